"""A step that the host has made, and an accelerator may not."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.profiling.capture.events import StepRecord
from lightning_dist.profiling.capture.losses import Loss
from lightning_dist.profiling.capture.taken import Taken
from lightning_dist.profiling.capture.timer import Cut
from lightning_dist.reducer.moments import Moments


@dataclass(frozen=True)
class PendingStep:
    """One rank's, at moments that may be to come.

    Args:
        taken: what was recorded in detail; None: nothing was.
        loss: what compression lost, where that was looked at.
        recording: nanoseconds of the host that recording it took.
        looking: the same of looking at what compression loses.
        overhead: the same of all that a profile took of it.
        was_disturbed: whether it was longer than such a step is.
    """

    step: int
    cut: Cut
    taken: Taken | None
    loss: Loss | None
    recording: int
    looking: int
    overhead: int
    was_disturbed: bool

    def is_past(self, moments: Moments) -> bool:
        """Whether all of it has been, on the accelerator too."""
        last = () if self.taken is None else self.taken.last
        return moments.are_past([self.cut.end, *last])

    def read(self, moments: Moments, *, in_detail: bool) -> StepRecord:
        """Its times; only when it is past. ``in_detail``: with phases."""
        begin, duration, phases = self.cut.read(moments)
        buckets, spans = (
            ((), ())
            if self.taken is None
            else self.taken.read(moments, since=self.cut.begin, begin=begin)
        )
        return StepRecord(
            self.step,
            begin,
            duration,
            phases if in_detail else (),
            buckets,
            spans,
            detailed=self.taken is not None,
            overhead=self.overhead,
        )
