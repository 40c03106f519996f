"""Intervals against sets of points."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_dist.profiling.analysis.intervals import (
    Interval,
    difference,
    intersection,
    lanes,
    length,
    union,
)

DRAWN = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def points(intervals: list[Interval]) -> set[int]:
    return {point for begin, end in intervals for point in range(begin, end)}


@settings(max_examples=300, deadline=None)
@given(a=DRAWN, b=DRAWN)
@example(a=[(10, 20)], b=[(0, 5), (7, 12), (14, 16), (18, 30)])
@example(a=[(0, 9), (12, 30)], b=[(3, 20), (22, 23)])
def test_they_are_sets_of_points(a: list[Interval], b: list[Interval]) -> None:
    one, other = union(a), union(b)
    assert points(one) == points(a)
    assert points(intersection(one, other)) == points(a) & points(b)
    assert points(difference(one, other)) == points(a) - points(b)
    assert length(one) == len(points(a))
    for each in (one, intersection(one, other), difference(one, other)):
        assert each == union(each)


def test_spans_that_overlap_are_in_lanes_of_their_own() -> None:
    assert lanes([(0, 5), (5, 9), (3, 6), (4, 8), (6, 7)]) == [0, 0, 1, 2, 1]
