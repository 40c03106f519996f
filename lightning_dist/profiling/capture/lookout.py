"""Sees collectives end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from lightning_dist.profiling.whatif.simulator import GLOO_AT_ONCE
from lightning_dist.reducer.moments import Moment, Moments, StreamMoments

Ended = Callable[[Moment], None]
_Given: TypeAlias = tuple[dist.Work, Ended]


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


@dataclass
class _Group:
    """What a group has under way, and how many threads wait for it."""

    given: queue.SimpleQueue[_Given | None] = field(default_factory=queue.SimpleQueue)
    unseen: int = 0
    threads: int = 0


class ThreadLookout:
    """Waits for collectives in threads, of each group in as many as it has under way at once.

    gloo begins those of a group in their order, and so do its threads here wait for them: always
    for just those that are under way, of which any may be the first to end.

    A callback would run in the thread of gloo that has done the work: waiting there for the
    interpreter holds up every collective behind it.
    """

    def __init__(self, now: Callable[[], Moment]) -> None:
        self._now = now
        self._groups: dict[str, _Group] = {}
        self._changed = threading.Condition()
        self._unseen = 0
        self.spent = 0

    def see(self, work: dist.Work, ended: Ended, *, group: str) -> None:
        with self._changed:
            of = self._groups.setdefault(group, _Group())
            self._unseen += 1
            of.unseen += 1
            is_short = of.threads < min(of.unseen, GLOO_AT_ONCE)
            of.threads += is_short
        of.given.put((work, ended))
        if is_short:
            name = f"comm-lookout {group}"
            threading.Thread(target=self._loop, args=(of,), name=name, daemon=True).start()

    def catch_up(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._unseen, seconds)

    def close(self) -> None:
        # Of a collective that never ends a thread waits on, and holds up nobody.
        groups, self._groups = self._groups, {}
        for of in groups.values():
            for _ in range(of.threads):
                of.given.put(None)

    def _loop(self, of: _Group) -> None:
        before = 0
        while (given := of.given.get()) is not None:
            work, ended = given
            try:
                work.wait()
            except Exception:  # whoever needs it is told, and it is no time of a transfer
                pass
            else:
                ended(self._now())
            del work, ended, given  # or what was sent lives on until the next one
            after = time.thread_time_ns()
            with self._changed:  # last: whoever has caught up reads the rest
                self.spent += after - before
                of.unseen -= 1
                self._unseen -= 1
                if not self._unseen:
                    self._changed.notify_all()
            before = after
