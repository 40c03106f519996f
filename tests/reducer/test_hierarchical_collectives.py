"""Collectives of a step where hosts reduce first: few, and the same for any number of parameters.

Accelerators send whole buckets; their sizes are asked for here on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from feeding import Fed, Tensors, backward, compressed, digest, feed
from layouts import FORMS, Layout
from worlds import Rank, run_threads

from lightning_dist.reducer.units import sizes

FOUR_HOSTS = Layout([[0, 1], [2, 3], [4, 5], [6, 7]])
layouts = pytest.mark.parametrize("layout", [*FORMS, FOUR_HOSTS], ids=str)


class Counting:
    """A watch that counts collectives by the name of their channel."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def launches(self, op: str, *, group: str, sent: int) -> Callable[[dist.Work], None] | None:
        self.found[group] += 1
        return None

    def waits(self) -> Callable[[], None]:
        return lambda: None


def shapes_of(count: int) -> dict[str, tuple[int, ...]]:
    """Of sizes that no number of owners divides."""
    return {f"layer{i}": (160 + 3 * i, 100 + i) for i in range(count)}


@pytest.fixture
def whole_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "UNIT_ELEMENTS", sizes.WHOLE_BUCKET)


def step(layout: Layout, parameters: int, codec: str) -> tuple[list[Counter[str]], Tensors]:
    """Collectives of every rank in its second step, and the mean that all have after it."""
    shapes = shapes_of(parameters)

    def body(rank: Rank) -> tuple[Counter[str], Tensors]:
        form = {"min_compress_numel": 1, "ddp": {"bucket_cap_mb": 100}, **layout.form}
        with compressed(rank, Fed(shapes), codec, **form) as (model, reducer):
            backward(model, feed(rank.rank, 0, shapes))
            counting = Counting()
            for channel in reducer.network.channels:
                channel.watch = counting
            found = backward(model, feed(rank.rank, 1, shapes))
            counting.found.pop("control", None)
            return counting.found, found

    ranks = run_threads(body, layout.size)
    assert len({digest(found) for _, found in ranks}) == 1
    return [counted for counted, _ in ranks], ranks[0][1]


@pytest.mark.usefixtures("whole_buckets")
@layouts
@pytest.mark.parametrize(
    ("codec", "parameters"),
    [
        ("none", 2),
        ("int8", 24),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("none", 24), ("int8", 2))),
    ],
)
def test_a_bucket_takes_two_collectives_a_level(
    codec: str, parameters: int, layout: Layout
) -> None:
    counts, mean = step(layout, parameters, codec)
    for counted in counts:
        assert counted["intra"] == 2
        assert all(number <= 2 for number in counted.values()), counted
    shapes, tolerance = shapes_of(parameters), 1e-5 if codec == "none" else 0.1
    for name, found in mean.items():
        expected = sum(feed(rank, 1, shapes)[name] for rank in range(layout.size)) / layout.size
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_pieces_take_more_of_them() -> None:
    """On a CPU, where one piece is encoded while another travels."""
    counts, _ = step(FOUR_HOSTS, 40, "int8")
    assert all(counted["intra"] > 2 for counted in counts)
