"""AsyncStateCheckpointer."""
