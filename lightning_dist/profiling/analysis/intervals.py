"""Sets of points on a time line, as sorted intervals ``(begin, end)`` that do not touch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Intervals: TypeAlias = Sequence[Interval]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Every point that is in any of them; empty and reversed ones have no point."""
    joined: list[Interval] = []
    for begin, end in sorted(each for each in intervals if each[0] < each[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def intersection(one: Intervals, other: Intervals) -> list[Interval]:
    """Every point that is in both unions."""
    common: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            common.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(one: Intervals, other: Intervals) -> list[Interval]:
    """Every point of the union ``one`` that is not in the union ``other``."""
    if not one:
        return []
    edges = [one[0][0], *(edge for each in other for edge in each), one[-1][1]]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return intersection(one, [(begin, end) for begin, end in gaps if begin < end])


def length(intervals: Intervals) -> int:
    """Length of a union."""
    return sum(end - begin for begin, end in intervals)


def lanes(spans: Sequence[Interval]) -> list[int]:
    """The lane of every span, as few as can be; no two of a lane overlap, though they may touch."""
    chosen = [0] * len(spans)
    free: list[int] = []  # from when on, by lane
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[index]
        assert begin <= end, f"a span ends before it begins: {spans[index]}"
        lane = next((lane for lane, since in enumerate(free) if since <= begin), len(free))
        if lane == len(free):
            free.append(end)
        free[lane] = end
        chosen[index] = lane
    return chosen
