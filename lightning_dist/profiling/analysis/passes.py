"""Exchanges of all gradients within one step: one, or as many as it has backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from lightning_dist.profiling.capture.events import BucketTimes, StepRecord


@dataclass(frozen=True)
class Pass:
    """One backward pass whose gradients travelled.

    Args:
        buckets: in the order in which they were ready.
        end: when the first bucket of the next one was ready; infinite of the last.
    """

    buckets: Sequence[BucketTimes]
    end: float

    @property
    def begin(self) -> int:
        """Its first bucket is ready."""
        return self.buckets[0].ready

    @property
    def last_ready(self) -> int:
        """The gradients of its last bucket are there."""
        return max(each.ready for each in self.buckets)

    def has(self, begin: int) -> bool:
        """Whether what began then, in nanoseconds of the step, is of this pass."""
        return self.begin <= begin < self.end


def passes_of(record: StepRecord) -> list[Pass]:
    """In their order. A bucket that comes again is of the next one."""
    groups: list[list[BucketTimes]] = []
    seen: set[int] = set()
    for bucket in record.buckets:
        if not groups or bucket.index in seen:
            groups.append([])
            seen = set()
        groups[-1].append(bucket)
        seen.add(bucket.index)
    ends = [*(float(group[0].ready) for group in groups[1:]), inf]
    return [Pass(group, end) for group, end in zip(groups, ends, strict=False)]


def asks_again(record: StepRecord) -> bool:
    """Whether a forward pass came after an exchange of the same step: an optimizer's closure."""
    first = min((bucket.ready for bucket in record.buckets), default=inf)
    return any(phase.name == "forward" and phase.begin > first for phase in record.phases)
