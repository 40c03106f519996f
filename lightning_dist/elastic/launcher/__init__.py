"""The launcher: how workers are started, and what their ends mean."""

PRELOAD = "LIGHTNING_DIST_PRELOAD"
"""Variable of the launcher: 0 starts all workers as usual, and none as a fork."""
