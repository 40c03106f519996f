"""Communication units: an exchange and the passes before and after it. Start at ``base.py``."""
