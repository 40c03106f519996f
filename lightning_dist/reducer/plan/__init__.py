"""What happens to one tensor, worked out once per layout. Start at ``planner.py``."""
