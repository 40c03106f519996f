"""Spans that overlap, side by side in as few lanes as they need."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dist.profiling.parts import Placed


def lanes(spans: Sequence[Placed]) -> list[int]:
    """The lane of every span: the first that is free when it begins."""
    chosen = [0] * len(spans)
    free: list[int] = []
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].begin, spans[i].end)):
        lane = next((j for j, end in enumerate(free) if end <= spans[i].begin), len(free))
        free[lane : lane + 1] = [spans[i].end]
        chosen[i] = lane
    return chosen


def count(chosen: Sequence[int]) -> int:
    """How many lanes those are."""
    return max(chosen, default=-1) + 1
