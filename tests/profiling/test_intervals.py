"""Intervals against sets of points."""

from __future__ import annotations

import random

import pytest

from lightning_dist.profiling.analysis.intervals import (
    Interval,
    difference,
    intersection,
    length,
    union,
)


def points(intervals: list[Interval]) -> set[int]:
    return {point for begin, end in intervals for point in range(begin, end)}


def drawn(rng: random.Random) -> list[Interval]:
    return [(rng.randrange(30), rng.randrange(30)) for _ in range(rng.randrange(6))]


@pytest.mark.parametrize("seed", range(200))
def test_they_are_sets_of_points(seed: int) -> None:
    rng = random.Random(seed)
    a, b = drawn(rng), drawn(rng)
    one, other = union(a), union(b)
    assert points(one) == points(a)
    assert points(intersection(one, other)) == points(a) & points(b)
    assert points(difference(one, other)) == points(a) - points(b)
    assert length(one) == len(points(a))
    for each in (one, intersection(one, other), difference(one, other)):
        assert each == union(each)
