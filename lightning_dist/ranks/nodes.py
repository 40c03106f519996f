"""Ranks of each node."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


def host_name() -> str:
    """Name of the node that this process runs on.

    ``LIGHTNING_DIST_HOSTNAME`` replaces it where several hosts report one name (containers,
    network namespaces).
    """
    return os.environ.get("LIGHTNING_DIST_HOSTNAME") or socket.gethostname()


@dataclass(frozen=True)
class Topology:
    """Node of every rank of a process group, as seen from ``rank``.

    ``intra_group`` holds the ranks of this node and ``inter_group`` one rank of every node, where
    the exchange is hierarchical; else None. In the leader form ranks that do not lead have no
    ``inter_group``. Both may be used between backward passes, by all their members in the same
    order.
    """

    nodes: tuple[str, ...]  # index: rank
    rank: int
    intra_group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    inter_group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this node, this one included."""
        return tuple(peer for peer in range(self.world_size) if self.same_node(peer))

    @property
    def local_rank(self) -> int:
        """Number of this rank among those of its node; 0 for the one that writes for it."""
        return self.local_ranks.index(self.rank)

    def same_node(self, peer: int) -> bool:
        return self.nodes[peer] == self.nodes[self.rank]

    @property
    def next_is_remote(self) -> bool:
        """Whether the ring neighbour ``rank + 1`` is on another node."""
        return not self.same_node((self.rank + 1) % self.world_size)

    def among(self, ranks: Sequence[int]) -> Topology:
        """The same for a group of ``ranks``, of which this is one."""
        nodes = tuple(self.nodes[rank] for rank in ranks)
        return Topology(nodes, list(ranks).index(self.rank))

    def by_node(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every node, nodes in the order of their first rank."""
        return ranks_by(self.nodes)

    def describe(self) -> str:
        """``2 nodes x 4 ranks``, or the counts where they differ."""
        return describe_counts([len(ranks) for ranks in self.by_node()])


def ranks_by(keys: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """The ranks of every key, keys in the order of their first rank."""
    found: dict[object, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, []).append(rank)
    return tuple(map(tuple, found.values()))


def describe_counts(counts: Sequence[int]) -> str:
    """``2 nodes x 4 ranks``, ``2 nodes with 3, 1 ranks``."""
    nodes = f"{len(counts)} node" + "s" * (len(counts) != 1)
    if len(set(counts)) == 1:
        return f"{nodes} x {counts[0]} rank" + "s" * (counts[0] != 1)
    return f"{nodes} with {', '.join(map(str, counts))} ranks"
