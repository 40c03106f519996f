"""Sees collectives end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_dist.reducer.moments import Moment, Moments, StreamMoments

Ended = Callable[[Moment], None]


class Lookout(Protocol):
    """Is given collectives that are under way."""

    spent: int
    """Nanoseconds of a core that it has taken so far."""

    def see(self, work: dist.Work, ended: Ended, *, group: str) -> None:
        """Call ``ended`` with the time when ``work`` of ``group`` has ended; not if it fails."""

    def catch_up(self, seconds: float) -> bool:
        """Wait until all that was given has been seen, at most so long; whether it has."""

    def close(self) -> None:
        """See nothing more."""


def lookout_for(moments: Moments) -> Lookout:
    """Where the work is."""
    if isinstance(moments, StreamMoments):
        return StreamLookout(moments)
    return ThreadLookout(moments.now)


class StreamLookout:
    """Sets a mark behind a collective when that is launched, in a stream that waits for it.

    In one stream for each group, whose collectives end in their order. A device has few queues:
    with more streams than these, some share one, and hold up each other.
    """

    def __init__(self, moments: StreamMoments) -> None:
        self._moments = moments
        self._streams: dict[str, torch.cuda.Stream] = {}
        self.spent = 0

    def see(self, work: dist.Work, ended: Ended, *, group: str) -> None:
        begin = time.monotonic_ns()
        if group not in self._streams:
            self._streams[group] = self._moments.new_stream()
        with torch.cuda.stream(self._streams[group]):
            # NCCL's future is done at the launch: the stream waits, not the host. Not of the work,
            # after whose `wait` torch may give away memory that its owner has not waited for.
            work.get_future().wait()
            ended(self._moments.now())
        self.spent += time.monotonic_ns() - begin

    def catch_up(self, seconds: float) -> bool:
        return True

    def close(self) -> None:
        pass


class ThreadLookout:
    """Waits for collectives in a thread, one after the other in the order in which they are given.

    A callback would run in the thread of gloo that has done the work: waiting there for the
    interpreter holds up every collective behind it.
    """

    def __init__(self, now: Callable[[], Moment]) -> None:
        self._now = now
        self._queue: queue.SimpleQueue[tuple[dist.Work, Ended] | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given = self._seen = 0
        self.spent = 0

    def see(self, work: dist.Work, ended: Ended, *, group: str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="comm-lookout", daemon=True)
            self._thread.start()
        self._given += 1
        self._queue.put((work, ended))

    def catch_up(self, seconds: float) -> bool:
        if self._seen == self._given:
            return True
        mark = threading.Event()
        self._queue.put(mark)
        return mark.wait(seconds)

    def close(self) -> None:
        # Of a collective that never ends the thread waits on, and holds up nobody.
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
                ended(self._now())
            self.spent = time.thread_time_ns()
            self._seen += 1  # last: whoever has caught up reads the rest
            del work, ended, given  # or what was sent lives on until the next one
