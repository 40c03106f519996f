"""How one process of a run ends: notices, hangs, and exit codes."""
