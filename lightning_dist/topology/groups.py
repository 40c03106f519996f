"""Ranks in groups, and groups in groups: who reduces with whom, from the inside out.

A tree is nested tuples with ranks as leaves, all equally deep: ``((0, 1), (2, 3))`` are two hosts
of two ranks, ``(((0, 1), (2, 3)), ((4, 5), (6, 7)))`` two sites of two hosts each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Tree: TypeAlias = "tuple[Any, ...]"  # of ranks, or of trees


@dataclass(frozen=True)
class Level:
    """One group of ranks that reduce among themselves before anything leaves it.

    ``members`` are ranks. The first ``owners`` of them go on with what the group has reduced: all,
    each with its shard, or only the leader with everything.
    """

    members: tuple[int, ...]
    position: int  # of this rank among them
    owners: int
    weight: float  # of every member's value: the mean over all groups is the mean over all ranks
    beyond: int  # ranks that share what one owner takes on, at the levels outside this one

    @property
    def goes_on(self) -> bool:
        return self.position < self.owners


@dataclass(frozen=True)
class Route:
    """The way of one rank's gradient: through ``levels``, then between ``outer``.

    ``outer`` is empty for a rank that leaves the rest of the way to a leader.
    """

    levels: tuple[Level, ...]
    outer: tuple[int, ...]


def tree_of(groups: Sequence[Any]) -> Tree:
    """Nested sequences -> nested tuples.

    Raises:
        ValueError: something else than ranks and sequences, or groups that are not equally deep.
    """
    tree: Tree = _frozen(groups)
    depths = set(_depths(tree))
    if len(depths) > 1 or max(depths) < 2:
        raise ValueError(
            f"rank_groups must be groups of ranks, all equally deep, like [[0, 1], [2, 3]], got "
            f"{groups!r}"
        )
    return tree


def blocks_of(ranks_per_host: int, *, world_size: int) -> Tree:
    """Hosts of ``ranks_per_host`` ranks that follow each other.

    Raises:
        ValueError: the world does not consist of such hosts.
    """
    if world_size % ranks_per_host:
        raise ValueError(
            f"ranks_per_host must divide the number of ranks, got ranks_per_host={ranks_per_host} "
            f"for {world_size} ranks; name the groups with rank_groups=[[0, 1, 2], [3]]"
        )
    starts = range(0, world_size, ranks_per_host)
    return tuple(tuple(range(start, start + ranks_per_host)) for start in starts)


def require_cover(tree: Tree, *, world_size: int) -> None:
    """Raise ValueError unless every rank is in ``tree`` once."""
    ranks = [rank for group in innermost(tree) for rank in group]
    if sorted(ranks) != list(range(world_size)):
        missing = sorted(set(range(world_size)) - set(ranks))
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        unknown = sorted(set(ranks) - set(range(world_size)))
        raise ValueError(
            f"rank_groups must name each of the {world_size} ranks once; missing {missing}, more "
            f"than once {twice}, unknown {unknown}"
        )


def innermost(tree: Tree) -> list[tuple[int, ...]]:
    """The groups of ranks, in order."""
    if not isinstance(tree[0], tuple):
        return [tree]
    return [group for branch in tree for group in innermost(branch)]


def depth(tree: Tree) -> int:
    """Groups that a rank is in, if it goes on at every level: 2 for hosts of ranks."""
    return next(_depths(tree))


def rows_of(tree: Tree, *, world_size: int) -> tuple[int, ...]:
    """The outermost branch of every rank."""
    rows = [0] * world_size
    for row, branch in enumerate(tree):
        for group in innermost(branch) if isinstance(branch, tuple) else [(branch,)]:
            for rank in group:
                rows[rank] = row
    return tuple(rows)


def route(tree: Tree, rank: int, *, leader: bool) -> Route:
    """The way of ``rank`` through ``tree``; ``leader``: one rank goes on where all could."""
    owners = list(_owners(tree, leader=leader))
    levels: list[Level] = []
    while isinstance(tree[0], tuple):
        groups = innermost(tree)
        members = next(group for group in groups if rank in group)
        inside = len(levels)
        level = Level(
            members=members,
            position=members.index(rank),
            owners=owners[inside],
            weight=len(groups) / sum(map(len, groups)),
            beyond=math.prod(owners[inside + 1 :]),
        )
        levels.append(level)
        if not level.goes_on:
            return Route(tuple(levels), ())
        tree = _without_innermost(tree, level.position)
    return Route(tuple(levels), tree)


def groups_of(tree: Tree, *, leader: bool) -> list[tuple[int, ...]]:
    """Every group on the way of any rank, once, in an order that is the same on all."""
    if not isinstance(tree[0], tuple):
        return [tree]
    found = innermost(tree)
    for position in range(next(_owners(tree, leader=leader))):
        found += groups_of(_without_innermost(tree, position), leader=leader)
    return list(dict.fromkeys(found))


def _owners(tree: Tree, *, leader: bool) -> Iterator[int]:
    """Of every level from the inside out; the same on all ranks."""
    while isinstance(tree[0], tuple):
        sizes = {len(group) for group in innermost(tree)}
        yield 1 if leader or len(sizes) > 1 else min(sizes)
        tree = _without_innermost(tree, 0)


def _without_innermost(tree: Tree, position: int) -> Tree:
    """The tree of the ranks that are at ``position`` of their innermost groups."""
    if not isinstance(tree[0][0], tuple):
        return tuple(group[position] for group in tree)
    return tuple(_without_innermost(branch, position) for branch in tree)


def _frozen(groups: Any) -> Any:
    if isinstance(groups, Sequence) and not isinstance(groups, str) and groups:
        return tuple(map(_frozen, groups))
    if type(groups) is int:
        return groups
    raise ValueError(
        f"rank_groups must hold ranks (int) and groups that are not empty, got {groups!r}"
    )


def _depths(tree: Any) -> Iterator[int]:
    if not isinstance(tree, tuple):
        yield 0
        return
    for branch in tree:
        yield from (depth + 1 for depth in _depths(branch))
