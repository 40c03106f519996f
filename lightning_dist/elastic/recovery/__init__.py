"""Recovery within the process: the ranks that are left go on when others die."""
