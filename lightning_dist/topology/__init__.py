"""Ranks of each host, and their groups. No gradients, no collectives."""

from lightning_dist.topology.hosts import Topology, this_host

__all__ = ["Topology", "this_host"]
