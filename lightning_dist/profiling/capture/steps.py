"""Steps and phases, cut out of what can be seen of any training loop.

Seen are the forward passes of the model, the backward passes and the optimizer; nobody says where a
step begins. A step ends with the last optimizer step before the next forward pass, and what comes
after that, such as loading data, is the begin of the next. Where an optimizer makes its step within
a forward pass, as Lightning's manual optimization does, each of them ends a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TypeAlias

from msgspec.structs import replace

from lightning_dist.profiling.capture.codec_error import ErrorSample
from lightning_dist.profiling.capture.events import BucketTimes, Phase, Span, StepRecord
from lightning_dist.reducer.device_clock import DeviceClock, Timestamp

BucketRow: TypeAlias = tuple[Timestamp, Timestamp, BucketTimes]
SpanRow: TypeAlias = tuple[str, int, Timestamp, Timestamp, str, str, int, int]
"""Values of a span, in the order of its fields."""


@dataclass(frozen=True)
class Cut:
    """A step, cut out, at clock that may be to come.

    Args:
        phases: names, with begin and end; some of them may have taken no time.
        left_out: begin and end of what lies between phases and is not of the step, as a validation
            between the micro-batches of an accumulation.
    """

    begin: Timestamp
    end: Timestamp
    phases: Sequence[tuple[str, Timestamp, Timestamp]]
    left_out: Sequence[tuple[Timestamp, Timestamp]] = ()

    def read(self, clock: DeviceClock) -> tuple[int, int, tuple[Phase, ...]]:
        """Begin, duration, and phases from the begin on, in nanoseconds; when ``end`` is past.

        What is before a part that is left out is moved to the end of that part: exchanges, which
        come last, stay where they were.
        """
        names = [name for name, _, _ in self.phases]
        flat = [self.begin, self.end]
        for pair in (*(each[1:] for each in self.phases), *self.left_out):
            flat += pair
        times = clock.read(flat, since=self.begin)
        (begin, end), *pairs = zip(times[::2], times[1::2], strict=True)
        left_out = pairs[len(names) :]

        def moved(time: int) -> int:
            return time + sum(until - since for since, until in left_out if time <= since)

        begin = moved(begin)
        phases = tuple(
            Phase(name, moved(at) - begin, moved(until) - begin)
            for name, (at, until) in zip(names, pairs, strict=False)
            if at < until
        )
        return begin, end - begin, phases


@dataclass(frozen=True)
class StepEvents:
    """Buckets and spans of a step, at clock that may be to come.

    Args:
        buckets: when their gradients and when their means were there; the times within them do not
            count.
    """

    buckets: Sequence[BucketRow]
    spans: Sequence[SpanRow]

    def read(
        self, clock: DeviceClock, *, since: Timestamp, begin: int | None = None
    ) -> tuple[tuple[BucketTimes, ...], tuple[Span, ...]]:
        """The same in nanoseconds from ``begin`` on; all of it is past.

        Args:
            since: the first moment of the step.
            begin: None: when that was.
        """
        if begin is None:
            (begin,) = clock.read([since], since=since)
        readies = clock.read([row[0] for row in self.buckets], since=since)
        dones = clock.read([row[1] for row in self.buckets], since=since)
        begins = clock.read([row[2] for row in self.spans], since=since)
        ends = clock.read([row[3] for row in self.spans], since=since)
        buckets = [
            replace(times, ready=ready - begin, done=done - begin)
            for ready, done, (_, _, times) in zip(readies, dones, self.buckets, strict=True)
        ]
        spans = [
            Span(phase, bucket, at - begin, until - begin, op, group, sent, order)
            for at, until, (phase, bucket, _, _, op, group, sent, order) in zip(
                begins, ends, self.spans, strict=True
            )
        ]
        return (
            tuple(sorted(buckets, key=attrgetter("ready"))),
            tuple(sorted(spans, key=attrgetter("begin"))),
        )


@dataclass(frozen=True)
class PendingStep:
    """A step that the host has made, and an accelerator may not.

    Args:
        events: what was recorded in detail; None: nothing was.
        error: of a codec, where that was sampled.
        recording: nanoseconds of the host that recording it took.
        sampling: the same of sampling a codec's error.
        overhead: the same of all that a profile took of it.
        was_disturbed: whether it was longer than such a step is.
    """

    step: int
    cut: Cut
    events: StepEvents | None
    error: ErrorSample | None
    recording: int
    sampling: int
    overhead: int
    was_disturbed: bool

    def is_past(self, clock: DeviceClock) -> bool:
        """Whether all of it has been, on the accelerator too."""
        events = self.events or StepEvents((), ())
        dones = (row[1] for row in events.buckets)
        ends = (row[3] for row in events.spans)
        return clock.are_past(chain([self.cut.end], dones, ends))

    def read(self, clock: DeviceClock, *, in_detail: bool) -> StepRecord:
        """Its times; only when it is past. ``in_detail``: with phases."""
        begin, duration, phases = self.cut.read(clock)
        buckets, spans = (
            ((), ())
            if self.events is None
            else self.events.read(clock, since=self.cut.begin, begin=begin)
        )
        return StepRecord(
            self.step,
            begin,
            duration,
            phases if in_detail else (),
            buckets,
            spans,
            detailed=self.events is not None,
            overhead=self.overhead,
        )


class StepTimer:
    """Is told of events in their order, with their time.

    Args:
        begin: from when on time is counted.
    """

    def __init__(self, begin: Timestamp) -> None:
        self._begin = begin
        self._spans: list[tuple[str, Timestamp, Timestamp]] = []
        self._left_out: list[tuple[Timestamp, Timestamp]] = []
        self._apart: Timestamp | None = None  # until then an evaluation was, of a step or of none
        self._phase, self._since = "between_steps", begin
        self._synchronised: Timestamp | None = None
        self._stepped: Timestamp | None = None
        self._is_optimizing = False
        self._passes = 0  # forward, since an optimizer has begun its step

    @property
    def has_means(self) -> bool:
        """Whether gradients have been made means of all ranks since the last step."""
        return self._synchronised is not None

    def forward(self, now: Timestamp) -> Cut | None:
        """A forward pass of training begins; the step that it follows, if that is over.

        An optimizer that asks for several passes, as LBFGS does of its closure, has one step.
        """
        is_asked_again = self._is_optimizing and self._passes > 0
        self._passes += 1
        cut = None
        if not is_asked_again:
            cut = self.end() if self._apart is None else self._leave_out(self._apart)
        self._enter("forward", now)
        return cut

    def backward(self, now: Timestamp) -> None:
        """The backward pass begins."""
        self._enter("backward", now)

    def backward_ended(self, now: Timestamp, *, synchronised: bool) -> None:
        """It has ended; ``synchronised``: with the mean over all ranks."""
        self._enter("optimizer" if synchronised else "between_steps", now)
        if synchronised:
            self._synchronised, self._stepped = now, None

    def stepping(self, now: Timestamp, *, exchanged: bool) -> None:
        """An optimizer begins its step; ``exchanged``: after gradients have travelled.

        A backward pass that nobody saw ran within the forward pass; ``backward`` has both of them.
        """
        self._is_optimizing, self._passes = True, 0
        self._apart = None
        if exchanged and self._phase == "forward":
            self._phase = "backward"
            self.backward_ended(now, synchronised=True)

    def stepped_within(self) -> Cut | None:
        """The optimizer's step was within a forward pass, which may have another; the step."""
        if self._synchronised is None:
            return None
        cut = self._cut()
        self._phase = "forward"
        return cut

    def forward_ended(self) -> None:
        """What is left of a pass, after a step within it, is of no phase."""
        if self._phase == "forward" and self._since == self._begin:
            self._phase = "between_steps"

    def stepped(self, now: Timestamp) -> None:
        """An optimizer has made its step."""
        self._is_optimizing = False
        if self._synchronised is not None:
            self._stepped = now

    def restart(self, now: Timestamp) -> Cut | None:
        """What was since the last event is not of the training; the step that is over, if any.

        Where a pass or a step of an optimizer is to come it may be of the step, as a target that
        the model computes without gradients: then the next event tells.
        """
        if self._phase != "between_steps" and self._stepped is None:
            self._apart = now
            return None
        return self._leave_out(now)

    def end(self) -> Cut | None:
        """The step that is over, if any."""
        return self._cut() if self.has_means else None

    def _leave_out(self, until: Timestamp) -> Cut | None:
        cut = self.end()
        since = self._since
        if self._left_out and self._left_out[-1][1] == since:
            since, _ = self._left_out.pop()  # another batch of one validation
        if self._spans:
            self._left_out.append((since, until))
        else:
            self._begin = until
        self._phase, self._since, self._apart = "between_steps", until, None
        return cut

    def _enter(self, phase: str, now: Timestamp) -> None:
        self._spans.append((self._phase, self._since, now))
        self._phase, self._since, self._apart = phase, now, None

    def _cut(self) -> Cut:
        assert self._synchronised is not None
        end = self._synchronised if self._stepped is None else self._stepped
        self._enter("between_steps", end)
        cut = Cut(self._begin, end, self._spans, self._left_out)
        self._begin, self._spans, self._left_out = end, [], []
        self._synchronised = self._stepped = None
        return cut
