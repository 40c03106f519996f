"""Times of steps, ranks and collectives, computed from the records of all ranks."""
