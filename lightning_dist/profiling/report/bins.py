"""Many steps as few bars: runs of neighbours of equal length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from lightning_dist.profiling.report.text import finite

MOST_BARS = 300
FEW_BARS = 80
"""Up to so many there is room for gaps, outlines and marks."""

T = TypeVar("T")


def bins(count: int, *, most: int = MOST_BARS) -> list[slice]:
    """``count`` neighbours in at most ``most`` runs, whose lengths differ by one at most."""
    number = min(count, most)
    return [slice(i * count // number, (i + 1) * count // number) for i in range(number)]


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are numbers, with the digits that a picture needs."""
    numbers = [value for value in map(finite, values) if value is not None]
    return digits(sum(numbers) / len(numbers)) if numbers else None


def digits(value: float, *, count: int = 5) -> float:
    """Without digits that only make the page longer."""
    return float(f"{value:.{count}g}")


def most_frequent(values: Sequence[T | None]) -> T | None:
    """The first of the most frequent ones, None left out."""
    counted = Counter(value for value in values if value is not None).most_common(1)
    return counted[0][0] if counted else None


def middles(steps: Sequence[int], runs: Sequence[slice]) -> list[float]:
    """Where the runs are on an axis of steps."""
    return [(steps[run][0] + steps[run][-1]) / 2 for run in runs]


def ends(steps: Sequence[int]) -> tuple[float, float]:
    """Of an axis that has room for exactly these steps."""
    return steps[0] - 0.5, steps[-1] + 0.5


def of_steps(steps: Sequence[int], *, run: slice) -> str:
    """``"step 7"``, ``"steps 7 to 9"``."""
    first, last = steps[run][0], steps[run][-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"
