"""Sees collectives end, in a thread of its own.

A callback would run in the thread of gloo that has done the work: waiting there for the interpreter
holds up every collective behind it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from lightning_dist.exchange.channel import Pending

Ended = Callable[[int], None]


class Lookout:
    """Waits for collectives, one after the other in the order in which they are given.

    Args:
        clock: in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._queue: queue.SimpleQueue[tuple[Pending, Ended] | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given = self._seen = 0
        self.spent = 0
        """Nanoseconds of a core that the thread has taken so far."""

    def see(self, work: Pending, ended: Ended) -> None:
        """Call ``ended`` with the time when ``work`` has ended; not at all if it fails."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="comm-lookout", daemon=True)
            self._thread.start()
        self._given += 1
        self._queue.put((work, ended))

    def catch_up(self, seconds: float) -> bool:
        """Wait until all that was given has been seen, at most so long; whether it has."""
        if self._seen == self._given:
            return True
        mark = threading.Event()
        self._queue.put(mark)
        return mark.wait(seconds)

    def close(self) -> None:
        """End the thread. Of a collective that never ends it waits on, and holds up nobody."""
        self._queue.put(None)
        self._thread = None

    def _loop(self) -> None:
        while (given := self._queue.get()) is not None:
            if isinstance(given, threading.Event):
                given.set()
                continue
            work, ended = given
            try:
                work.wait()
            except Exception:  # whoever needs it is told, and it is no time of a transfer
                pass
            else:
                ended(self._clock())
            self.spent = time.thread_time_ns()
            self._seen += 1  # last: whoever has caught up reads the rest
            del work, ended, given  # or what was sent lives on until the next one
