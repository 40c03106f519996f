"""Clocks that are wrong by a known amount."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class PlantedClock:
    """The clock of this machine, ahead by ``shift`` at its start and by ``drift`` per million more.

    Args:
        calls: how often it has been read.
    """

    shift: int = 0
    drift: int = 0
    calls: int = field(default=0, compare=False)

    def __call__(self) -> int:
        self.calls += 1
        return self.at(time.monotonic_ns())

    def at(self, true: int) -> int:
        """What it shows then."""
        return true + self.shift + true * self.drift // 1_000_000

    def true(self, shown: int) -> int:
        """When it shows that."""
        return (shown - self.shift) * 1_000_000 // (1_000_000 + self.drift)
