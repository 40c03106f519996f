"""Bytes and rounds of an exchange on each level, by formula; nothing is measured here.

With ``W`` ranks, ``L`` of them on each of ``H`` hosts, and payloads of ``b`` bytes; what counts is
the link of the busiest host, in one direction:

==========  ===========================  ==========  =====================
exchange    over a host's link           rounds      second collective
==========  ===========================  ==========  =====================
allreduce   ``2 (W-1)/W b``              ``2 (W-1)``
gather      ``(W-1) b``                  ``W-1``
two_shot    ``L (W-L)/W b``              ``W-1``     ``(W-1)/W b``, ``W-1``
==========  ===========================  ==========  =====================

Rings have one edge that leaves a host, and each edge carries the same. Two ranks gather where more
would exchange in two shots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective of all ranks, as a link sees it.

    Args:
        nbytes: over the link.
        rounds: messages that wait for one another.
    """

    nbytes: float
    rounds: int


def collectives(exchange: str, size: float, counts: Sequence[int]) -> tuple[Collective, ...]:
    """What follows one another in an exchange over the link of the busiest host.

    Args:
        exchange: of the codec.
        size: bytes of a rank's payload.
        counts: ranks of every host. One rank of each: what a peer sends.
    """
    world = sum(counts)
    ring = (world - 1) / world * size
    if exchange == "allreduce":
        return (Collective(2 * ring, 2 * (world - 1)),)
    if exchange == "gather" or world <= 2:
        return (Collective((world - 1) * size, world - 1),)
    assert exchange == "two_shot", exchange
    leaving = max(count * (world - count) for count in counts) / world * size
    return Collective(leaving, world - 1), Collective(ring, world - 1)


def total(parts: Sequence[Collective]) -> Collective:
    """All of them, one after the other."""
    return Collective(sum(each.nbytes for each in parts), sum(each.rounds for each in parts))


def inside(size: float, local: int, *, leader: bool) -> Collective:
    """One way inside a host, to its owners or back: into or out of the busiest rank."""
    share = size if leader else size / local
    return Collective((local - 1) * share, local - 1)
