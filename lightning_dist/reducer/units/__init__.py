"""What travels together: an exchange and the passes before and after it. Start at ``base.py``."""
