"""How many bytes a rank sends, and how many of them leave its host.

Formulas per rank for a payload of ``b`` bytes and ``W`` ranks; rings send to ``rank + 1`` only:

===================  ======================  =====================================
exchange             bytes sent              of them to other hosts
===================  ======================  =====================================
allreduce (ring)     ``2 (W-1)/W * b``       all, if the next rank is on another
all_gather (ring)    ``(W-1) * b``           all, if the next rank is on another
all_to_all           ``(W-1)/W * b``         ``b/W`` for every rank on another
===================  ======================  =====================================

Headers of TCP and Ethernet are not in these counts (about 3 to 5 %).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.topology import Topology


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends: to ranks on its own host, and to other hosts."""

    intra: int = 0
    inter: int = 0

    @property
    def total(self) -> int:
        return self.intra + self.inter

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.intra + other.intra, self.inter + other.inter)


def ring_allreduce(nbytes: int, topology: Topology) -> Sent:
    return _to_next(2 * (topology.world_size - 1) * nbytes // topology.world_size, topology)


def ring_all_gather(nbytes: int, topology: Topology) -> Sent:
    return _to_next((topology.world_size - 1) * nbytes, topology)


def all_to_all(nbytes: int, topology: Topology) -> Sent:
    each = nbytes // topology.world_size
    remote = topology.remote_peers
    return Sent(intra=each * (topology.world_size - 1 - remote), inter=each * remote)


def _to_next(nbytes: int, topology: Topology) -> Sent:
    return Sent(inter=nbytes) if topology.next_is_remote else Sent(intra=nbytes)
