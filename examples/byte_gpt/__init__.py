"""A byte-level GPT on the sources of Python's standard library: small, real, on every machine."""
