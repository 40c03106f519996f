"""Trees of ranks for hypothesis: any order of ranks, even and uneven, two or three levels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from lightning_dist.topology.groups import Level, Ranks, Tree, innermost, levels_of

EXAMPLES: list[Tree] = [
    ((0, 1), (2, 3)),
    ((3, 0), (1, 2)),
    ((0, 1, 2), (3,)),
    ((0,), (1, 2), (3, 4, 5)),
    (((0, 1), (2, 3)), ((4, 5), (6, 7))),
    (((0, 1), (2, 3)), ((4, 5),)),
    (((0, 1, 2), (3,)), ((4,),)),
    (((0, 4), (2, 6)), ((1, 5), (3, 7))),
]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Two or three levels of 1 to 3 branches, ranks in any order; half of them even."""
    depth, even = draw(st.integers(2, 3)), draw(st.booleans())
    sizes = [draw(st.integers(1, 3)) for _ in range(depth)]

    def branch(level: int) -> Any:
        if level == depth:
            return None
        size = sizes[level] if even else draw(st.integers(1, 3))
        return [branch(level + 1) for _ in range(size)]

    shape = branch(0)
    ranks = iter(draw(st.permutations(range(count(shape)))))
    return filled(shape, ranks)


def count(shape: Any) -> int:
    return 1 if shape is None else sum(map(count, shape))


def filled(shape: Any, ranks: Iterator[int]) -> Any:
    return next(ranks) if shape is None else tuple(filled(branch, ranks) for branch in shape)


def ranks_of(tree: Tree) -> list[int]:
    return sorted(rank for group in innermost(tree) for rank in group)


@dataclass(frozen=True)
class Way:
    """The groups that a rank is in: one of each of ``levels``, and of the outermost, if any."""

    levels: list[Level]
    members: list[Ranks]  # of this rank's group, at each of ``levels``
    outer: Ranks

    def goes_on(self, rank: int, depth: int) -> bool:
        return self.members[depth].index(rank) < self.levels[depth].owners


def way_of(tree: Tree, rank: int, *, leader: bool) -> Way:
    *levels, outermost = levels_of(tree, leader=leader)
    found = [(level, group) for level in levels if (group := level.group_of(rank))]
    return Way(
        [level for level, _ in found],
        [group for _, group in found],
        outermost.group_of(rank) or (),
    )


def ways_of(tree: Tree, *, leader: bool) -> list[Way]:
    """Of every rank."""
    return [way_of(tree, rank, leader=leader) for rank in ranks_of(tree)]
