"""AsyncCheckpoint, and the asynchronous CheckpointIO."""
