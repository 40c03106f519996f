"""The launcher: how workers are started, and what their ends mean."""
