"""Whether what compression owes grows without end."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from statistics import median

from lightning_dist.profiling.capture.events import ErrorRecord

_RECENT = 5
_FEWEST = 2 * _RECENT
_MOST = 200
"""Newest samples of a bucket that are compared."""
_TIMES = 3.0
_LEAST = 10.0
"""A residual that is smaller, in gradients, arrives soon enough, however it has grown."""


@dataclass(frozen=True)
class Growth:
    """The residual of a bucket was ``before`` times its gradient, and is ``now`` times as large."""

    bucket: int
    step: int
    before: float
    now: float

    def __str__(self) -> str:
        return (
            f"the residual of bucket {self.bucket} has grown from {self.before:.3g} to "
            f"{self.now:.3g} times its gradient (step {self.step}): what the codec leaves out is "
            "not made up for, and arrives late or never. Use a codec or options that lose less (a "
            "larger ratio or rank, int8), or a smaller learning rate"
        )


class ResidualAlarm:
    """Compares the newest residuals of a bucket with those of before.

    A residual fills while training begins, with sparse codecs for hundreds of steps: the first
    quarter of the samples of a bucket counts for nothing, the second is what was before.
    """

    def __init__(self) -> None:
        self._ratios: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_MOST))

    def add(self, error: ErrorRecord) -> Growth | None:
        """The growth that is there with this sample, if it is alarming."""
        if error.residual_ratio is None:
            return None
        ratios = self._ratios[error.bucket]
        ratios.append(error.residual_ratio)
        count = len(ratios)
        if count < _FEWEST:
            return None
        now = median(islice(ratios, count - _RECENT, None))
        before = median(islice(ratios, count // 4, count // 2))
        if now <= max(_TIMES * before, _LEAST):
            return None
        return Growth(error.bucket, error.step, before, now)


def growth_of(errors: Iterable[ErrorRecord]) -> Growth | None:
    """The largest that there was in the samples of a rank, in their order."""
    alarm = ResidualAlarm()
    found = [growth for each in errors if (growth := alarm.add(each)) is not None]
    return max(found, key=lambda growth: growth.now, default=None)
