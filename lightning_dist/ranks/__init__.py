"""Ranks of each node, and their groups. No gradients, no collectives."""

from lightning_dist.ranks.levels import Topology, host_name

__all__ = ["Topology", "host_name"]
