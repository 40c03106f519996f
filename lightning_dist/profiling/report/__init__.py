"""What people look at: a profile as a page, made of the types in ``parts``."""
