"""A time by which something must have happened."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """A time by which something must have happened; readable from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: float | None = None
        self._why = ""

    def set(self, seconds: float, why: str) -> None:
        """Be due in ``seconds`` from now."""
        self._due, self._why = self._clock() + seconds, why

    @property
    def is_set(self) -> bool:
        """Whether it will be due."""
        return self._due is not None

    def clear(self) -> None:
        """Not be due."""
        self._due = None

    def expired(self) -> str:
        """Why it was set, if it is due; otherwise nothing."""
        due = self._due
        return self._why if due is not None and self._clock() >= due else ""
