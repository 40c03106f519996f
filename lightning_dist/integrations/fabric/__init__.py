"""Strategies for Fabric."""
