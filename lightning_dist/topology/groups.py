"""Ranks in groups, and groups in groups: who reduces with whom, from the inside out.

A tree is nested tuples with ranks as leaves, all equally deep: ``((0, 1), (2, 3))`` are two hosts
of two ranks, ``(((0, 1), (2, 3)), ((4, 5), (6, 7)))`` two sites of two hosts each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Tree: TypeAlias = "tuple[Any, ...]"  # of ranks, or of trees
Ranks: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """Groups of ranks that reduce at the same time, each of them by itself.

    The first ``owners`` ranks of a group go on to the next level with what the group has reduced:
    all, each with its share, or only the leader with everything. At the outermost level nobody
    goes on.
    """

    groups: tuple[Ranks, ...]
    owners: int
    weight: float  # of every rank's value: the mean over all groups is the mean over all ranks
    beyond: int = 1  # ranks that share what one owner takes on, at the levels outside this one

    def group_of(self, rank: int) -> Ranks | None:
        """The group that ``rank`` is in; None where it did not go on from the level inside."""
        return next((group for group in self.groups if rank in group), None)


def levels_of(tree: Tree, *, leader: bool) -> list[Level]:
    """The levels of ``tree`` from the inside out; ``leader``: one rank goes on where all could."""
    trees, found = [tree], list[Level]()
    while isinstance(trees[0][0], tuple):
        groups = innermost(trees[0])  # the other trees differ from it by their ranks alone
        sizes = {len(group) for group in groups}
        owners = 1 if leader or len(sizes) > 1 else min(sizes)
        weight = len(groups) / sum(map(len, groups))
        found.append(Level(tuple(g for tree in trees for g in innermost(tree)), owners, weight))
        trees = [_without_innermost(tree, at) for tree in trees for at in range(owners)]
    outermost = Level(tuple(trees), owners=0, weight=1 / len(tree))
    beyond = [math.prod(outer.owners for outer in found[i + 1 :]) for i in range(len(found))]
    inner = [replace(level, beyond=ranks) for level, ranks in zip(found, beyond, strict=True)]
    return [*inner, outermost]


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


def innermost(tree: Tree) -> list[Ranks]:
    """The groups of ranks, in order."""
    if not isinstance(tree[0], tuple):
        return [tree]
    return [group for branch in tree for group in innermost(branch)]


def rows_of(tree: Tree, *, world_size: int) -> Ranks:
    """The outermost branch of every rank."""
    rows = [0] * world_size
    for row, branch in enumerate(tree):
        for group in innermost(branch if isinstance(branch, tuple) else (branch,)):
            for rank in group:
                rows[rank] = row
    return tuple(rows)


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
