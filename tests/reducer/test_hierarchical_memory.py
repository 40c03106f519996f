"""How much a rank keeps where the exchange is hierarchical: its share, or all if it leads."""

from __future__ import annotations

import pytest
from feeding import SHAPES, Fed, backward, compressed, feed
from layouts import HOSTS_OF_FOUR, PAIRS, UNEVEN, Layout
from torch import Size
from worlds import Rank, run_threads

DIVIDES = {"large": (768, 1024), "small": (6, 1024)}
"""By 2, 3 and 4 owners with shares of whole 512 elements; the first is several fragments."""

TRIPLES = [[0, 1, 2], [3, 4, 5]]


def held(layout: Layout, shapes: dict[str, tuple[int, ...]], codec: str) -> list[dict[str, int]]:
    """Elements of the residual of every parameter on every rank."""

    def body(rank: Rank) -> dict[str, int]:
        form = {**layout.form, "min_compress_numel": 256}
        with compressed(rank, Fed(shapes), codec, **form) as (model, reducer):
            backward(model, feed(rank.rank, 0, shapes))
            sizes = {name: reducer.residuals[name].numel() for name in reducer.residuals}
            if codec != "powersgd":
                assert reducer.memory()["residual_bytes"] == 4 * sum(sizes.values())
            return sizes

    return run_threads(body, layout.size)


@pytest.mark.parametrize(
    ("layout", "parts"),
    [(Layout(PAIRS), 2), (Layout(TRIPLES), 3), (Layout(HOSTS_OF_FOUR), 4)],
    ids=["pairs", "triples", "fours"],
)
def test_a_rank_keeps_its_share(layout: Layout, parts: int) -> None:
    assert held(layout, DIVIDES, "int8") == [
        {name: Size(shape).numel() // parts for name, shape in DIVIDES.items()}
    ] * len(layout.ranks)


@pytest.mark.parametrize(
    ("layout", "leaders"),
    [(Layout(PAIRS, leader=True), {0, 2}), (Layout(UNEVEN), {0, 3})],
    ids=["pairs", "uneven"],
)
def test_a_leader_keeps_everything_and_the_others_nothing(
    layout: Layout, leaders: set[int]
) -> None:
    everything = {name: Size(shape).numel() for name, shape in DIVIDES.items()}
    for rank, found in enumerate(held(layout, DIVIDES, "int8")):
        assert found == {name: n * (rank in leaders) for name, n in everything.items()}


@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.1,block_size=128", "threshold:tau=1.5"])
@pytest.mark.parametrize("layout", [Layout(PAIRS), Layout(TRIPLES), Layout(UNEVEN)], ids=str)
def test_a_host_keeps_every_element_once(layout: Layout, codec: str) -> None:
    """Whatever the sizes; matrices of powersgd are whole on one rank."""
    ranks = held(layout, SHAPES, codec)
    for host in layout.tree:
        for name in ("first", "second"):
            assert sum(ranks[r][name] for r in host) == Size(SHAPES[name]).numel()


def test_a_matrix_is_on_one_rank_of_each_host() -> None:
    ranks = held(Layout(PAIRS), SHAPES, "powersgd")
    for host in PAIRS:
        for name in ("first", "second"):
            assert sorted(ranks[r].get(name, 0) for r in host) == [0, Size(SHAPES[name]).numel()]
    assert ranks[:2] == ranks[2:], "the same rank on every host"
