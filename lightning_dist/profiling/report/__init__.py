"""What people look at: a profile as a page, a trace, tables; made of the types in ``parts``."""
