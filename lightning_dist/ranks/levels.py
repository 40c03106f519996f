"""Nodes, or other groups of ranks: who reduces with whom, inside and then between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

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
