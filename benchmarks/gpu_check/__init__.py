"""One command that checks on a GPU what the tests can only simulate; see `__main__`."""
