"""Nodes and levels: groups of ranks, one inside another."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch.distributed as dist


Ranks: TypeAlias = tuple[int, ...]
Nodes: TypeAlias = tuple[Ranks, ...]
"""Ranks of every node: ``((0, 1), (2, 3))`` are two nodes of two ranks."""


@dataclass(frozen=True)
class Level:
    """Groups of ranks that reduce at the same time, each of them by itself.

    The first ``owners`` ranks of a node go on between nodes with what the node has reduced: all,
    each with its share, or only the leader with everything. Nobody goes on from there.
    """

    groups: Nodes
    owners: int
    weight: Fraction  # of every rank's value, so that the mean over groups is that over ranks

    def group_of(self, rank: int) -> Ranks | None:
        """The group that ``rank`` is in; None where it did not go on."""
        return next((group for group in self.groups if rank in group), None)


def levels_of(nodes: Nodes, *, leader: bool) -> tuple[Level, Level]:
    """The levels inside and between ``nodes``; ``leader``: one rank goes on where all could."""
    sizes = {len(ranks) for ranks in nodes}
    owners = 1 if leader or len(sizes) > 1 else min(sizes)
    inside = Level(nodes, owners, Fraction(len(nodes), sum(map(len, nodes))))
    between = tuple(zip(*(ranks[:owners] for ranks in nodes), strict=True))
    return inside, Level(between, 0, Fraction(1, len(nodes)))


def is_nodes(groups: object) -> bool:
    """True for groups of ranks, none of them empty."""

    def is_list(value: object) -> bool:
        return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0

    return is_list(groups) and all(
        is_list(ranks) and all(type(rank) is int for rank in ranks)
        for ranks in groups  # type: ignore[attr-defined]
    )


def nodes_of(groups: Sequence[Any]) -> Nodes:
    """Sequences of ranks -> tuples."""
    return tuple(map(tuple, groups))


def blocks_of(ranks_per_node: int, *, world_size: int) -> Nodes:
    """Nodes of ``ranks_per_node`` ranks that follow each other.

    Raises:
        ValueError: the world does not consist of such nodes.
    """
    if world_size % ranks_per_node:
        raise ValueError(
            f"ranks_per_node must divide the number of ranks, got ranks_per_node={ranks_per_node} "
            f"for {world_size} ranks; name the groups with rank_groups=[[0, 1, 2], [3]]"
        )
    starts = range(0, world_size, ranks_per_node)
    return tuple(tuple(range(start, start + ranks_per_node)) for start in starts)


def require_cover(nodes: Nodes, *, world_size: int) -> None:
    """Raise ValueError unless every rank is in ``nodes`` once."""
    ranks = [rank for group in nodes for rank in group]
    if sorted(ranks) != list(range(world_size)):
        missing = sorted(set(range(world_size)) - set(ranks))
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        unknown = sorted(set(ranks) - set(range(world_size)))
        raise ValueError(
            f"rank_groups must name each of the {world_size} ranks once; missing {missing}, more "
            f"than once {twice}, unknown {unknown}; write such as [[0, 1], [2, 3]]"
        )


def rows_of(nodes: Nodes) -> Ranks:
    """The number of the node of every rank."""
    numbers = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    return tuple(numbers[rank] for rank in sorted(numbers))


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
        """Topology of a group of ``ranks``, of which this is one."""
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
    by_key: dict[object, list[int]] = {}
    for rank, key in enumerate(keys):
        by_key.setdefault(key, []).append(rank)
    return tuple(map(tuple, by_key.values()))


def describe_counts(counts: Sequence[int]) -> str:
    """``2 nodes x 4 ranks``, ``2 nodes with 3, 1 ranks``."""
    nodes = f"{len(counts)} node" + "s" * (len(counts) != 1)
    if len(set(counts)) == 1:
        return f"{nodes} x {counts[0]} rank" + "s" * (counts[0] != 1)
    return f"{nodes} with {', '.join(map(str, counts))} ranks"
