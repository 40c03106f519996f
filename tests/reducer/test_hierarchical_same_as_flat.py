"""Without compression a hierarchical exchange gives the mean that a flat one gives.

Every grid of hosts and ranks of up to 6 ranks (slow: 8), in both forms where both exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, digest, feed
from layouts import MORE, Layout, every_layout, grids
from torch import Tensor
from worlds import Rank, run_threads

SHAPES = {"first": (40, 48), "bias": (40,), "second": (33, 50), "one": (1,)}


def exact(rank: int, size: int) -> Tensors:
    """``sign * size * 2**j`` with the same ``j`` on all ranks: no sum or mean of it is rounded."""
    common = torch.Generator().manual_seed(5)
    own = torch.Generator().manual_seed(100 + rank)

    def one(shape: tuple[int, ...]) -> Tensor:
        powers = torch.randint(-20, 20, shape, generator=common)
        signs = torch.randint(0, 2, shape, generator=own) * 2.0 - 1
        return torch.ldexp(signs * size, powers)

    return {name: one(shape) for name, shape in SHAPES.items()}


@dataclass
class Ran:
    """One rank's two steps of codec none: exact gradients, then random ones."""

    exact: str
    random: Tensors


def two_steps(rank: Rank, layout: Layout | None) -> Ran:
    """Flat without a ``layout``. The second step has other buckets than the first."""
    tree, leader = (None, False) if layout is None else (layout.tree, layout.leader)
    ddp = {"bucket_cap_mb": 0.004}
    with compressed(rank, Fed(SHAPES), "none", tree=tree, leader=leader, ddp=ddp) as (model, red):
        first = backward(model, exact(rank.rank, rank.size))
        second = backward(model, feed(rank.rank, 0, SHAPES))
        assert (red.network.intra is not None) == (layout is not None)
    return Ran(digest([first[name] for name in SHAPES]), second)


def run(size: int, layouts: Sequence[Layout]) -> list[list[Ran]]:
    """``[layout][rank]``, the flat exchange first."""

    def body(rank: Rank) -> list[Ran]:
        return [two_steps(rank, layout) for layout in (None, *layouts)]

    return [list(of_ranks) for of_ranks in zip(*run_threads(body, size), strict=True)]


def test_every_grid_is_here() -> None:
    assert [len(grids(size)) for size in range(3, 9)] == [1, 4, 5, 11, 13, 22]
    assert all(layout.ranks == list(range(8)) for layout in every_layout(8))


@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        *((size, every_layout(size)) for size in range(3, 7)),
        (8, MORE[8]),
        *(pytest.param(n, every_layout(n), marks=pytest.mark.slow) for n in (7, 8)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else str(len(value)),
)
def test_it_is_the_flat_exchange(size: int, layouts: Sequence[Layout]) -> None:
    """Exact gradients are bit-equal, random ones the mean within rounding, replicas equal."""
    flat, *others = run(size, layouts)
    given = [exact(rank, size) for rank in range(size)]
    exact_mean = [torch.stack([g[n].double() for g in given]).mean(0).float() for n in SHAPES]
    assert {ran.exact for ran in flat} == {digest(exact_mean)}
    given = [feed(rank, 0, SHAPES) for rank in range(size)]
    mean = {n: sum(g[n].double() for g in given) / size for n in SHAPES}
    largest = {n: torch.stack([g[n].abs() for g in given]).amax(0).double() for n in SHAPES}
    for layout, of_ranks in zip(layouts, others, strict=True):
        assert {ran.exact for ran in of_ranks} == {digest(exact_mean)}, str(layout)
        assert len({digest(ran.random) for ran in of_ranks}) == 1, str(layout)
        for name, found in of_ranks[0].random.items():
            # Every sum and product rounds by 2**-24 of what is at most the largest value.
            bound = (size + 4) * 2.0**-24 * largest[name]
            assert ((found.double() - mean[name]).abs() <= bound).all(), (str(layout), name)
