"""End of a process: preemption, hangs and exit codes."""
