"""Launch of the ranks of a start, and their rendezvous."""
