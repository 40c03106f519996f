"""Training that a launcher restarts: who takes part, where it is, and how all agree to stop."""
