"""What is made of a profile to look at: a page, a trace, tables."""
