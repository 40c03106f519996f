"""Completion times of collectives."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_dist.profiling.whatif.simulator import GLOO_AT_ONCE
from lightning_dist.reducer.device_clock import DeviceClock, StreamClock, Timestamp

OnCompletion: TypeAlias = Callable[[Timestamp], None]


class CompletionWatcher:
    """Watches collectives for completion."""

    def __init__(self) -> None:
        self.spent = 0
        """Nanoseconds of a core that it has taken so far."""

    def watch(self, work: dist.Work, on_completion: OnCompletion, *, group: str) -> None:
        """Call ``on_completion`` with the time when ``work`` has completed; not if it fails."""
        raise NotImplementedError

    def drain(self, timeout: float) -> bool:
        """Wait for all collectives watched so far, for ``timeout`` seconds; False: some are left.

        Nothing is waited for where times are marks in a stream.
        """
        return True

    def close(self) -> None:
        """Watch nothing more."""


def completion_watcher(clock: DeviceClock) -> CompletionWatcher:
    """A watcher for collectives of the device whose times ``clock`` are."""
    if isinstance(clock, StreamClock):
        return StreamCompletionWatcher(clock)
    return ThreadCompletionWatcher(clock.now)


class StreamCompletionWatcher(CompletionWatcher):
    """Sets a mark behind a collective when that is launched, in a stream that waits for it.

    In one stream for each group, whose collectives complete in their order. A device has few
    queues: with more streams than these, some share one, and hold up each other.
    """

    def __init__(self, clock: StreamClock) -> None:
        super().__init__()
        self._device_clock = clock
        self._streams: dict[str, torch.cuda.Stream] = {}

    @override
    def watch(self, work: dist.Work, on_completion: OnCompletion, *, group: str) -> None:
        begin = time.monotonic_ns()
        if group not in self._streams:
            self._streams[group] = self._device_clock.new_stream()
        with torch.cuda.stream(self._streams[group]):
            # NCCL's future is done at the launch: the stream waits, not the host. Not of the work,
            # after whose `wait` torch may give away memory that its owner has not waited for.
            work.get_future().wait()
            on_completion(self._device_clock.now())
        self.spent += time.monotonic_ns() - begin


@dataclass
class _Group:
    """Collectives of a group that are under way, and threads that wait for them."""

    given: queue.SimpleQueue[tuple[dist.Work, OnCompletion] | None] = field(
        default_factory=queue.SimpleQueue
    )
    pending: int = 0
    threads: int = 0


class ThreadCompletionWatcher(CompletionWatcher):
    """Waits for collectives in threads, of each group in as many as it has under way at once.

    gloo begins those of a group in their order, and so do its threads here wait for them: always
    for just those that are under way, of which any may be the first to complete.

    A callback would run in the thread of gloo that has done the work: waiting there for the
    interpreter holds up every collective behind it.
    """

    def __init__(self, now: Callable[[], Timestamp]) -> None:
        super().__init__()
        self._now = now
        self._groups: defaultdict[str, _Group] = defaultdict(_Group)
        self._changed = threading.Condition()
        self._pending = 0

    @override
    def watch(self, work: dist.Work, on_completion: OnCompletion, *, group: str) -> None:
        with self._changed:
            of = self._groups[group]
            self._pending += 1
            of.pending += 1
            is_short = of.threads < min(of.pending, GLOO_AT_ONCE)
            of.threads += is_short
        of.given.put((work, on_completion))
        if is_short:
            name = f"comm-completion {group}"
            threading.Thread(target=self._loop, args=(of,), name=name, daemon=True).start()

    @override
    def drain(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    @override
    def close(self) -> None:
        # Of a collective that never completes a thread waits on, and holds up nobody.
        for of in self._groups.values():
            for _ in range(of.threads):
                of.given.put(None)
        self._groups.clear()

    def _loop(self, of: _Group) -> None:
        before = 0
        while (given := of.given.get()) is not None:
            work, on_completion = given
            try:
                work.wait()
            except Exception:  # whoever needs it is told, and it is no time of a transfer
                pass
            else:
                on_completion(self._now())
            del work, on_completion, given  # or what was sent lives on until the next one
            after = time.thread_time_ns()
            with self._changed:  # last: whoever has drained it reads the rest
                self.spent += after - before
                of.pending -= 1
                self._pending -= 1
                if not self._pending:
                    self._changed.notify_all()
            before = after
