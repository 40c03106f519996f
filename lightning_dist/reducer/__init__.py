"""One DDP bucket through codec and exchange; state keyed by parameter. Start at ``reducer.py``."""
