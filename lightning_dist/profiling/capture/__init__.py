"""Recording one rank's steps, gradients and collectives while it trains."""
