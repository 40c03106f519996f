"""Takes the times of one rank's gradients while they travel."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch.distributed as dist
from typing_extensions import override

from lightning_dist.profiling.capture.codec_error import CompressionErrorSampler
from lightning_dist.profiling.capture.completion import completion_watcher
from lightning_dist.profiling.capture.events import BucketTimes
from lightning_dist.reducer.chunk import Lane
from lightning_dist.reducer.device_clock import DeviceClock, HostClock, Timestamp
from lightning_dist.reducer.observer import EncodedBucket, Observer, Phase

_CALIBRATION = 500
_UNSEEN = 3.0
"""What recording adds to a step, over what can be counted of it: threads change places, caches are
cold. Measured with 40 buckets on two busy cores: 2.2 to 3.4 times (benchmarks/profiler)."""
_LONGEST_PERIOD = 1024
_WEIGHT = 0.1
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples are spread evenly, whichever of them are taken."""
_TIMEOUT = 0.1
"""Seconds. Where a step is over, so are its collectives; the thread may not have seen the last."""


BucketRow: TypeAlias = tuple[Timestamp, Timestamp, BucketTimes]
"""When gradients and mean of a bucket were there; the times within the last do not count."""
SpanRow: TypeAlias = tuple[str, int, Timestamp, Timestamp, str, str, int, int]
"""Values of a span, in the order of its fields."""


class Events(NamedTuple):
    """What was recorded of a step, at timestamps that may be to come."""

    buckets: Sequence[BucketRow] = ()
    spans: Sequence[SpanRow] = ()


class Recorder(Observer):
    """Buckets and spans of the step that is under way.

    Appends to lists, from the thread of the backward pass, that of the reducer, and one of its own;
    nothing is computed before :meth:`take`.

    Args:
        clock: of the host, in nanoseconds.
        device_clock: of the work; None: of the host, by ``clock``.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        device_clock: DeviceClock | None = None,
    ) -> None:
        self.device_clock: DeviceClock = HostClock(clock) if device_clock is None else device_clock
        self._now = self.device_clock.now
        self.is_on = True
        """Whether anything is recorded, besides compression errors that were asked for."""
        self.errors = CompressionErrorSampler(clock)
        self._completions = completion_watcher(self.device_clock)
        self._ready: dict[int, Timestamp] = {}  # of buckets whose mean nobody has begun
        self._buckets: list[BucketRow] = []
        self._spans: list[SpanRow] = []
        self._orders: Counter[str] = Counter()
        self._bucket, self._phase = -1, ""
        self._since: Timestamp = 0
        self.spent = 0
        """Nanoseconds of this step that went into what only a profile needs, on or off."""
        self._looked = 0  # of the thread, before this step
        self.is_closed = False

    @override
    def ready(self, bucket: int) -> None:
        if self.is_on:
            self._ready[bucket] = self._now()  # of a pass that is tried again the last counts

    @override
    def works(self, bucket: int, phase: Phase) -> Callable[[], None]:
        self._bucket = bucket
        if not self.is_on:
            return _nothing
        self._phase, self._since = phase, self._now()
        return self._work_ends

    def is_for(self, bucket: int) -> None:
        """What is launched from now on is for this bucket."""
        self._bucket = bucket

    def _work_ends(self) -> None:
        row = (self._phase, self._bucket, self._since, self._now(), "", "", 0, -1)
        self._spans.append(row)
        self._phase = ""

    @override
    def waits(self) -> Callable[[], None]:
        if not (self.is_on and self._phase):
            return _nothing
        phase = self._phase
        self._work_ends()  # waiting is not work

        def over() -> None:
            self._phase, self._since = phase, self._now()

        return over

    @override
    def launches(
        self, op: str, *, group: str, sent: int, mean: BucketTimes | None = None
    ) -> Callable[[dist.Work], None] | None:
        """The same as of any observer; ``mean``: of a bucket that is there when it has ended."""
        order = self._orders[group]
        self._orders[group] = order + 1
        if not self.is_on:
            return None
        bucket, begin = self._bucket, self._now()
        ready = None if mean is None else self._ready.pop(mean.index, None)
        # Of this step, also where it is over before this has ended.
        spans, buckets = self._spans, self._buckets

        def completed(end: Timestamp) -> None:
            spans.append(("exchange", bucket, begin, end, op, group, sent, order))
            if mean is not None and ready is not None:
                buckets.append((ready, end, mean))

        return lambda work: self._completions.watch(work, completed, group=group)

    @override
    def looks(self, encoded_buckets: Iterator[EncodedBucket]) -> Callable[[], None]:
        return self.errors.look(encoded_buckets)

    @override
    def settled(self, buckets: Sequence[tuple[int, Sequence[Lane]]]) -> None:
        if not self.is_on:
            return
        done = self._now()
        for index, lanes in buckets:
            raw = sum(lane.raw_bytes for lane in lanes)
            sents = [lane.sent for lane in lanes]
            intra, inter = sum(s.intra for s in sents), sum(s.inter for s in sents)
            codec = "+".join(dict.fromkeys(lane.codec.name for lane in lanes))
            self.note(done, BucketTimes(index, 0, 0, raw, intra, inter, codec))

    def note(self, done: Timestamp, bucket: BucketTimes) -> None:
        """The mean of a bucket is there; when its gradients were is known already."""
        ready = self._ready.pop(bucket.index, None)
        if ready is not None:
            self._buckets.append((ready, done, bucket))

    def cost(self, of_event: float) -> int:
        """Nanoseconds by which recording made this step longer; an event alone takes so many."""
        self._completions.drain(_TIMEOUT)
        events = 2 * (len(self._spans) + len(self._buckets))
        return round(_UNSEEN * (events * of_event + self._completions.spent - self._looked))

    @property
    def has_exchanged(self) -> bool:
        """Whether any gradients have travelled in this step, on or off."""
        return bool(self._orders or self._buckets)

    def take(self) -> Events:
        """Events since the last call."""
        self._completions.drain(_TIMEOUT)
        events = Events(self._buckets, self._spans)
        self.drop()
        return events

    def drop(self) -> None:
        """Forget what was recorded since the last call."""
        self._ready, self._buckets, self._spans = {}, [], []
        self._orders.clear()
        self.spent, self._looked = 0, self._completions.spent

    def close(self) -> None:
        """Record nothing more."""
        self.is_on, self.is_closed = False, True
        self._completions.close()


class Governor:
    """Steps that are recorded in detail: fewer, where that costs more than the budget.

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
        if mean > self._budget and self.period < _LONGEST_PERIOD:
            self.period *= 2
        elif self.period > 1 and 2 * mean < self._budget / 2:
            self.period //= 2


def cost_of_an_event(device_clock: DeviceClock | None = None) -> float:
    """Nanoseconds that one call of a recorder takes on this machine."""
    recorder = Recorder(device_clock=device_clock)
    begin = time.perf_counter_ns()
    for _ in range(_CALIBRATION):
        recorder.works(0, "encode")()
    return (time.perf_counter_ns() - begin) / (2 * _CALIBRATION)


def _nothing() -> None:
    pass
