"""Layouts of nodes: the trees of ranks that hierarchical exchanges are tried on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Tree = list[Any]

PAIRS: Tree = [[0, 1], [2, 3]]
UNEVEN: Tree = [[0, 1, 2], [3]]
HOSTS_OF_FOUR: Tree = [[0, 1, 2, 3], [4, 5, 6, 7]]


@dataclass(frozen=True)
class Layout:
    """A tree and the form in which it is used, or so many ranks in a flat exchange."""

    tree: Tree | None
    leader: bool = False
    flat: int = 0

    @property
    def size(self) -> int:
        return self.flat or len(self.ranks)

    @property
    def ranks(self) -> list[int]:
        return sorted(leaves(self.tree))

    @property
    def form(self) -> dict[str, Any]:
        """Arguments of ``compressed``."""
        return {"tree": self.tree, "leader": self.leader}

    def __str__(self) -> str:
        if self.flat:
            return f"flat{self.flat}"
        return f"{self.tree}{' leader' if self.leader else ''}".replace(" ", "")


def flat(size: int) -> Layout:
    return Layout(None, flat=size)


FORMS = [Layout(PAIRS), Layout(PAIRS, leader=True), Layout(UNEVEN)]
"""Sharded, leader, uneven (which is a leader form too)."""


def leaves(tree: Any) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
        return
    for branch in tree:
        yield from leaves(branch)


def partitions(total: int, most: int) -> Iterator[list[int]]:
    """``4 -> [4], [3, 1], [2, 2], [2, 1, 1], ...``."""
    if not total:
        yield []
    for first in range(min(total, most), 0, -1):
        for rest in partitions(total - first, first):
            yield [first, *rest]


def grids(size: int) -> list[Layout]:
    """Every layout of ``size`` ranks on several nodes, one with several; both forms where even."""
    found = []
    for counts in partitions(size, size):
        if 1 < len(counts) < size:
            ranks = iter(range(size))
            tree = [[next(ranks) for _ in range(count)] for count in counts]
            found += [Layout(tree)] + ([Layout(tree, leader=True)] if len(set(counts)) == 1 else [])
    return found


MORE = {
    4: [Layout([[0, 2], [1, 3]]), Layout([[3, 1], [0, 2]])],
    5: [Layout([[4, 1], [0, 3, 2]])],
    6: [Layout([[4, 0], [1, 5], [3, 2]])],
    8: [Layout([[0, 4, 2, 6], [1, 5, 3, 7]])],
}
"""Ranks in another order."""


def every_layout(size: int) -> list[Layout]:
    return grids(size) + MORE.get(size, [])
