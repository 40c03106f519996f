"""Keeps what the profiler costs within a bound, by looking at fewer steps."""

from __future__ import annotations

_MOST = 1024
_WEIGHT = 0.1
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples are spread evenly, whichever of them are taken."""


class Governor:
    """Says which steps are recorded in detail.

    Ranks decide for themselves: the steps of a rank that looks at fewer are among those of the
    others. The distance between two steps varies, so that what happens every n-th step is seen as
    often as it happens.

    Args:
        budget: most that the profiler may take of a step.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self.period = 1
        """One of so many steps is recorded in detail, a power of two."""
        self._share = 0.0

    def wants(self, step: int) -> bool:
        """Whether ``step`` is to be recorded in detail."""
        return step * _GOLDEN % 2**64 < 2**64 // self.period

    def spent(self, nanoseconds: float, *, of: int) -> None:
        """A step that took ``of`` nanoseconds was recorded in detail, which took so many of them.

        What one detailed step costs is spread over its period.
        """
        share = nanoseconds / max(of, 1)
        self._share += (share - self._share) * (_WEIGHT if self._share else 1.0)
        mean = self._share / self.period
        if mean > self._budget and self.period < _MOST:
            self.period *= 2
        elif self.period > 1 and 2 * mean < self._budget / 2:
            self.period //= 2
