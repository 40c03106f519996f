"""Where communication time goes: records of every rank, and what follows from them."""
