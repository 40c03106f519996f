"""Checkpoints for Accelerate: `lightning_dist.accelerate.AsyncState`."""
