"""Samples of a run: their order, and which rank gets which."""
