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
    left: list[Interval] = []
    j = 0
    for begin, end in one:
        while j < len(other) and other[j][1] <= begin:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if begin < other[k][0]:
                left.append((begin, other[k][0]))
            begin = max(begin, other[k][1])
            k += 1
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Intervals) -> int:
    """How long a union is."""
    return sum(end - begin for begin, end in intervals)
