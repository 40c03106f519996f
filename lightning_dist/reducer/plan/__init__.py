"""Plan of one tensor, made once per layout. Start at ``planner.py``."""
