"""Puts spans that overlap on lanes on which none do."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dist.profiling.analysis.intervals import Interval


def lanes(spans: Sequence[Interval]) -> list[int]:
    """The lane of every span: from 0 on, as few as can be. Spans that only touch share one."""
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


def count(chosen: Sequence[int]) -> int:
    """How many lanes those are."""
    return max(chosen, default=-1) + 1
