"""How the ranks of a start are launched, and how they meet."""
