"""Reports: a profile as a page, a trace and tables; made of the types in ``parts``."""
