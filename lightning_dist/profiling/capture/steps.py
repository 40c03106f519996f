"""Steps and phases, cut out of what can be seen of any training loop.

Seen are the forward passes of the model, the backward passes and the optimizer; nobody says where a
step begins. A step ends with the last optimizer step before the next forward pass, and what comes
after that, such as loading data, is the begin of the next. Where an optimizer makes its step within
a forward pass, as Lightning's manual optimization does, each of them ends a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from lightning_dist.measurement.microbenchmark import DeviceClock, Timestamp
from lightning_dist.profiling.capture.events import (
    OF_NO_BUCKET,
    BucketTimes,
    Phase,
    Span,
    StepRecord,
)
from lightning_dist.profiling.capture.recorder import Recorder, Row, Sample


class PendingStep(NamedTuple):
    """A step that the host has completed, and an accelerator may not have.

    Rows are values of a record in the order of its fields, with timestamps, which may be to come.

    Args:
        excluded: begin and end of what lies between phases and is not of the step, as a validation
            between the micro-batches of an accumulation.
        error: compression error, where one was sampled.
        recording, sampling, overhead: nanoseconds of the host that recording, sampling the error,
            and all of the profiler took.
        was_disturbed: the step was longer than such a step is.
    """

    begin: Timestamp
    end: Timestamp
    phases: Sequence[Row] = ()
    excluded: Sequence[tuple[Timestamp, Timestamp]] = ()
    number: int = 0
    buckets: Sequence[Row] = ()
    spans: Sequence[Row] = ()
    detailed: bool = True
    error: Sample | None = None
    recording: int = 0
    sampling: int = 0
    overhead: int = 0
    was_disturbed: bool = False

    def is_past(self, clock: DeviceClock) -> bool:
        """Whether all of it has been, on the accelerator too."""
        ends = ((row[2] for row in self.buckets), (row[3] for row in self.spans))
        return clock.are_past(chain([self.end], *ends))

    def read(self, clock: DeviceClock) -> StepRecord:
        """Its times in nanoseconds; all of it is past.

        What is before an excluded interval is moved to the end of that interval.
        """
        first = self.begin

        def timed(rows: Sequence[Row], place: int) -> Iterator[tuple[Row, int, int]]:
            """Rows, with the times of the timestamps at ``place`` and behind it."""
            at = clock.read([row[place] for row in rows], since=first)
            until = clock.read([row[place + 1] for row in rows], since=first)
            return zip(rows, at, until, strict=True)

        excluded = [(since, until) for _, since, until in timed(self.excluded, 0)]

        def moved(time: int) -> int:
            return time + sum(until - since for since, until in excluded if time <= since)

        begin, end = clock.read([first, self.end], since=first)
        begin = moved(begin)
        phases = [
            Phase(name, moved(at) - begin, moved(until) - begin)
            for (name, _, _), at, until in timed(self.phases, 1)
            if at < until
        ]
        buckets = [
            BucketTimes(index, ready - begin, done - begin, raw, intra, inter, codec)
            for (index, _, _, raw, intra, inter, codec), ready, done in timed(self.buckets, 1)
        ]
        of_spans = timed(self.spans, 2)
        if excluded:
            of_spans = ((row, moved(at), moved(until)) for row, at, until in of_spans)
        spans = [
            Span(phase, bucket, at - begin, until - begin, *rest)
            for (phase, bucket, _, _, *rest), at, until in of_spans
            if bucket != OF_NO_BUCKET or at >= begin  # FSDP gathers for a validation too
        ]
        return StepRecord(
            self.number,
            begin,
            end - begin,
            tuple(phases),
            tuple(sorted(buckets, key=attrgetter("ready"))),
            tuple(sorted(spans, key=attrgetter("begin"))),
            detailed=self.detailed,
            overhead=self.overhead,
        )


class StepTimer:
    """Finds the end of steps from events as they happen.

    Args:
        now: time of an event.
        recorder: knows whether gradients have travelled.
        on_step: called with every step, when it is known to be over.
    """

    def __init__(
        self,
        now: Callable[[], Timestamp],
        recorder: Recorder,
        on_step: Callable[[PendingStep], None],
    ) -> None:
        self._now, self._recorder, self._on_step = now, recorder, on_step
        self._begin = self._since = now()
        self._phase = "between_steps"
        self._phases: list[tuple[str, Timestamp, Timestamp]] = []
        self._excluded: list[tuple[Timestamp, Timestamp]] = []
        self._evaluated: Timestamp | None = None  # until then; it may be of a step or of none
        self._synchronised: Timestamp | None = None
        self._stepped: Timestamp | None = None
        self._in_forward = False
        self._passes: int | None = None  # forward, within the step of an optimizer

    def forward(self) -> None:
        """A forward pass of training begins.

        An optimizer that asks for several passes, as LBFGS does of its closure, has one step.
        """
        now = self._now()
        self._in_forward = True
        if self._passes is not None:
            self._passes += 1
        if self._passes is None or self._passes == 1:
            if self._evaluated is not None:
                self._exclude(self._evaluated)
            self.end()
        if self._recorder.has_exchanged and self._synchronised is None:
            self._recorder.drop()  # of a backward pass that has failed
        self._enter("forward", now)

    def forward_ended(self) -> None:
        """A forward pass has ended. What is left of it after a step within it is of no phase."""
        self._in_forward = False
        if self._phase == "forward" and self._since == self._begin:
            self._phase = "between_steps"

    def backward(self) -> None:
        """A backward pass begins."""
        self._in_forward = False
        self._enter("backward", self._now())

    def backward_ended(self, *, synchronised: bool) -> None:
        """A backward pass has ended; ``synchronised``: with the mean over all ranks."""
        now = self._now()
        self._enter("optimizer" if synchronised else "between_steps", now)
        if synchronised:
            self._synchronised, self._stepped = now, None

    def stepping(self) -> None:
        """An optimizer begins its step.

        A backward pass that nobody saw ran within the forward pass: ``backward`` has both then.
        """
        self._passes = 0
        self._evaluated = None
        if self._phase == "forward" and self._recorder.has_exchanged:
            self._phase = "backward"
            self.backward_ended(synchronised=True)

    def stepped(self) -> None:
        """An optimizer has made its step. Within a forward pass that ends a step."""
        self._passes = None
        if self._synchronised is None:
            return
        self._stepped = self._now()
        if self._in_forward:
            self.end()
            self._phase = "forward"

    def exclude_interval(self) -> None:
        """Time since the last event belongs to no step: a validation, a checkpoint.

        Between a forward pass and the optimizer's step it may be of the step, as a target that the
        model computes without gradients: then the next event tells.
        """
        now = self._now()
        if self._phase != "between_steps" and self._stepped is None:
            self._evaluated = now
        else:
            self._exclude(now)

    def end(self) -> None:
        """The step is over, if its gradients are means of all ranks."""
        if self._synchronised is None:
            return
        end = self._synchronised if self._stepped is None else self._stepped
        self._enter("between_steps", end)
        step = PendingStep(self._begin, end, self._phases, self._excluded)
        self._begin, self._phases, self._excluded = end, [], []
        self._synchronised = self._stepped = None
        self._on_step(step)

    def drop(self) -> None:
        """The step is taken again: what there is of it was none."""
        self._begin = self._since = self._now()
        self._phases, self._excluded, self._phase = [], [], "between_steps"
        self._synchronised = self._stepped = self._evaluated = self._passes = None
        self._in_forward = False
        self._recorder.drop()

    def _exclude(self, until: Timestamp) -> None:
        self.end()
        since = self._since
        if self._excluded and self._excluded[-1][1] == since:
            since, _ = self._excluded.pop()  # another batch of one validation
        if self._phases:
            self._excluded.append((since, until))
        else:
            self._begin = until
        self._phase, self._since, self._evaluated = "between_steps", until, None

    def _enter(self, phase: str, now: Timestamp) -> None:
        self._phases.append((self._phase, self._since, now))
        self._phase, self._since, self._evaluated = phase, now, None
