"""The Trainer of Lightning."""
