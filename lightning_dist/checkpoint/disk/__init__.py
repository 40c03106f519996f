"""Checkpoints on disk: format, commit, verification. Standard library only, fsspec for URLs.

The writer process imports this package and nothing else of ours, so that it starts in a tenth of a
second and holds no torch (:mod:`lightning_dist.checkpoint.writers`).
"""
