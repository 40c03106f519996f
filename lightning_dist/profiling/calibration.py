"""How fast the links are while nothing else is on them: what a profile compares its rates with."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from lightning_dist.profiling.bandwidth import measure, pairs
from lightning_dist.profiling.records import LinkRecord

_BYTES = 4 * 2**20
"""Of the collective: much more than what a shaper or a switch lets through at once."""
_PAIR_BYTES = 2**20
_MOST_HOSTS = 8
"""With more hosts the pairs would take too long."""


def measure_links(group: dist.ProcessGroup, *, hosts: Sequence[str], name: str) -> list[LinkRecord]:
    """A collective of all ranks, and each pair of hosts in turn. Collective, about a second.

    Args:
        group: of all ranks, used for nothing else meanwhile.
        hosts: of every rank.
        name: of the group in the records.
    """
    if group.size() < 2:
        return []
    whole = measure(group, "all_reduce", _BYTES, 3)
    found = [LinkRecord(name, sent=whole.sent, seconds=whole.median)]
    first_of = list({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    leaders = sorted(first_of)
    if not 2 <= len(leaders) <= _MOST_HOSTS:
        return found
    of_leaders = dist.new_group(leaders, backend="gloo")
    rank = dist.get_rank()
    if rank in leaders:
        seconds = pairs(of_leaders, _PAIR_BYTES, iterations=1).seconds[leaders.index(rank)]
        for peer, taken in zip(leaders, seconds, strict=True):
            if taken is not None:
                found.append(LinkRecord(name, sent=_PAIR_BYTES, seconds=taken, peer=peer))
    return found
