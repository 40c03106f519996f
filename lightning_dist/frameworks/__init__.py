"""Adapters to the frameworks. They hold no algorithm."""
