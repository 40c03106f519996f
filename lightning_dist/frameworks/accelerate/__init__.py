"""Accelerate: `lightning_dist.accelerate`."""
