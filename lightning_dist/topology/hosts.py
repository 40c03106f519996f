"""Ranks of each host."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


def this_host() -> str:
    """Name of the host this process runs on.

    ``LIGHTNING_DIST_HOSTNAME`` replaces it where several hosts report one name (containers,
    network namespaces).
    """
    return os.environ.get("LIGHTNING_DIST_HOSTNAME") or socket.gethostname()


@dataclass(frozen=True)
class Topology:
    """Host of every rank of a process group, as seen from ``rank``.

    ``intra_group`` holds the ranks of this host and ``inter_group`` one rank of every host, where
    the exchange is hierarchical; else None. In the leader form ranks that do not lead have no
    ``inter_group``. Both may be used between backward passes, by all their members in the same
    order.
    """

    hosts: tuple[str, ...]  # index: rank
    rank: int
    intra_group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    inter_group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this host, this one included."""
        return tuple(peer for peer in range(self.world_size) if self.same_host(peer))

    @property
    def local_rank(self) -> int:
        """Number of this rank among those of its host; 0 for the one that writes for it."""
        return self.local_ranks.index(self.rank)

    def same_host(self, peer: int) -> bool:
        return self.hosts[peer] == self.hosts[self.rank]

    @property
    def next_is_remote(self) -> bool:
        """Whether the ring neighbour ``rank + 1`` is on another host."""
        return not self.same_host((self.rank + 1) % self.world_size)

    def among(self, ranks: Sequence[int]) -> Topology:
        """The same for a group of ``ranks``, of which this is one."""
        hosts = tuple(self.hosts[rank] for rank in ranks)
        return Topology(hosts, list(ranks).index(self.rank))

    def by_host(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every host, hosts in the order of their first rank."""
        return ranks_by(self.hosts)

    def describe(self) -> str:
        """``2 hosts x 4 ranks``, or the counts where they differ."""
        return describe_counts([len(ranks) for ranks in self.by_host()])


def ranks_by(keys: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """The ranks of every key, keys in the order of their first rank."""
    found: dict[object, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, []).append(rank)
    return tuple(map(tuple, found.values()))


def describe_counts(counts: Sequence[int]) -> str:
    """``2 hosts x 4 ranks``, ``2 hosts with 3, 1 ranks``."""
    hosts = f"{len(counts)} host" + "s" * (len(counts) != 1)
    if len(set(counts)) == 1:
        return f"{hosts} x {counts[0]} rank" + "s" * (counts[0] != 1)
    return f"{hosts} with {', '.join(map(str, counts))} ranks"
