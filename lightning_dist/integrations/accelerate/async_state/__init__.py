"""AsyncState."""
