"""Many steps as few bars: runs of neighbours, or equal parts of an axis of steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from lightning_dist.profiling.analysis.metrics import finite

MOST_BARS = 250
"""Half of the steps that a summary is of: where those are spread evenly, no column is empty."""
FEW_BARS = 80
"""Up to so many there is room for gaps, outlines and marks."""

BLANK = " Steps that were not looked at in detail are blank."

T = TypeVar("T")


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


@dataclass(frozen=True)
class Columns:
    """Equal parts of an axis of steps, some of which may have no step.

    Args:
        first: step of the first column.
        width: of every column, in steps.
        runs: slices of the steps, one for each column.
    """

    first: int
    width: int
    runs: Sequence[slice]

    @property
    def middles(self) -> list[float]:
        """Where the columns are on the axis."""
        half = (self.width - 1) / 2
        return [self.first + self.width * i + half for i in range(len(self.runs))]

    @property
    def range(self) -> tuple[float, float]:
        """Ends of an axis that has room for exactly these columns."""
        begin = self.first - 0.5
        return begin, begin + self.width * len(self.runs)

    @property
    def gaps(self) -> str:
        """Part of a caption that says why some columns are empty, if there are such."""
        return BLANK if any(run.start == run.stop for run in self.runs) else ""


def columns(steps: Sequence[int], *, most: int = MOST_BARS) -> Columns:
    """At most ``most`` columns for the axis from the first of ``steps`` to the last."""
    length = steps[-1] - steps[0] + 1
    width = math.ceil(length / most)
    begins = range(steps[0], steps[-1] + 1, width)
    cuts = [*(bisect_left(steps, begin) for begin in begins), len(steps)]
    return Columns(steps[0], width, [slice(a, b) for a, b in pairwise(cuts)])
