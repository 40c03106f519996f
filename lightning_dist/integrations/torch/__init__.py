"""Plain DDP: what every framework's adapter is made of."""
