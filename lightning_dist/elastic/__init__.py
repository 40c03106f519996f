"""Training that a launcher restarts: what it told this rank, how the ranks of one start meet."""
