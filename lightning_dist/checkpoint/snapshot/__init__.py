"""Snapshots of the state of training: copied at once, or while training continues."""
