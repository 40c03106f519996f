"""Keeps what the profiler costs within a bound, by looking at fewer steps."""

from __future__ import annotations

_MOST = 1024
_WEIGHT = 0.1


class Governor:
    """Says which steps are recorded in detail.

    Ranks decide for themselves: periods are powers of two, so that the steps of a rank that looks
    at fewer are among those of the others.

    Args:
        budget: most that the profiler may take of a step.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self.period = 1
        """Every so many steps are recorded in detail."""
        self._share = 0.0

    def wants(self, step: int) -> bool:
        """Whether ``step`` is to be recorded in detail."""
        return step % self.period == 0

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
