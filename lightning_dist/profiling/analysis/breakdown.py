"""Parts of a step on every rank, and its exchanges on one time line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from lightning_dist.profiling.analysis.collectives import Exchange, begin_of, exchanges_of
from lightning_dist.profiling.analysis.intervals import (
    Interval,
    Intervals,
    difference,
    intersection,
    length,
    union,
)
from lightning_dist.profiling.analysis.parts import EXPOSED, PARTS, Timeline, TimelineSpan
from lightning_dist.profiling.analysis.unavailable import Unavailable
from lightning_dist.profiling.capture.events import PHASES, BucketTimes, Span, StepRecord
from lightning_dist.profiling.run import Run

_OTHERS = tuple(name for name in PHASES if name != "backward")


@dataclass(frozen=True)
class Analysed:
    """A step on one rank. Durations are nanoseconds, intervals count from its begin.

    Args:
        begin: on rank 0's clock.
        exchanges: in their order.
        moving: while any exchange moved, until all its members were done.
        parts: by name, all of :data:`PARTS`; they add up to ``duration``.
        union: while any exchange was in flight on this rank.
        hidden: share of ``union`` before the last gradient was ready.
        waited_for: waiting, hidden or not, by the rank that came last.
    """

    record: StepRecord
    rank: int
    begin: int
    exchanges: Sequence[Exchange]
    moving: Intervals
    parts: Mapping[str, int]
    union: int
    hidden: int
    waited_for: Mapping[int, int]

    @property
    def duration(self) -> int:
        """Duration of the step."""
        return self.record.duration

    @property
    def exposed(self) -> int:
        """Communication that compute does not hide."""
        return sum(self.parts[name] for name in EXPOSED)


def analyse(run: Run, step: int) -> list[Analysed]:
    """A step on every rank that has recorded it in detail.

    Where members of a collective have left no record of it, waiting for it is not known and all of
    it counts as transfer; :func:`unknown_wait` says so.
    """
    return [
        _analyse(run.ranks[rank].steps[step], exchanges, rank=rank, begin=begin_of(run, rank, step))
        for rank, exchanges in exchanges_of(run, step).items()
    ]


def unknown_wait(steps: Iterable[Analysed]) -> str:
    """Reason why waiting is not, or not wholly, known; empty if it is."""
    exchanges = [exchange for step in steps for exchange in step.exchanges]
    if missing := set[int]().union(*(each.missing for each in exchanges)):
        return Unavailable.NO_RECORD.format(ranks=", ".join(map(str, sorted(missing))))
    return Unavailable.NO_MEMBERS if any(each.arrival is None for each in exchanges) else ""


def timeline(run: Run, step: int, label: str) -> Timeline:
    """A step of all ranks that have recorded it, on the clock of rank 0."""
    exchanges = exchanges_of(run, step)
    begins = {
        rank: begin_of(run, rank, step) for rank, each in run.ranks.items() if step in each.steps
    }
    phases, buckets, spans, exposed = {}, {}, {}, {}
    for rank, begin in begins.items():
        at, record = begin - min(begins.values()), run.ranks[rank].steps[step]
        phases[rank] = [(each.name, each.begin + at, each.end + at) for each in record.phases]
        buckets[rank] = [(each.index, each.ready + at, each.done + at) for each in record.buckets]
        seen = iter(exchanges.get(rank, ()))
        spans[rank] = [
            _placed(span, next(seen) if span.phase == "exchange" else Exchange(span), at)
            for span in (record.spans if record.detailed else ())
        ]
        exposed[rank] = [(since + at, until + at) for since, until in exposed_in(record)]
    return Timeline(step, label, phases, buckets, spans, exposed)


def _placed(span: Span, exchange: Exchange, at: int) -> TimelineSpan:
    """A span of a rank that began the step ``at`` nanoseconds after the first one."""
    return TimelineSpan(
        span.phase,
        span.bucket,
        span.begin + at,
        span.end + at,
        arrival=None if exchange.arrival is None else exchange.arrival + at,
        op=span.op,
        group=span.group,
        sent=span.sent,
        last=exchange.last,
        collective_id=exchange.collective_id,
    )


def _analyse(
    record: StepRecord, exchanges: Sequence[Exchange], *, rank: int, begin: int
) -> Analysed:
    phases = {
        name: union((each.begin, each.end) for each in record.phases if each.name == name)
        for name in PHASES
    }
    window = exposed_in(record)
    transfer = union(each.transfer for each in exchanges)
    in_flight = union((each.span.begin, each.span.end) for each in exchanges)
    codec = union((each.begin, each.end) for each in record.spans if each.phase != "exchange")
    parts = {name: length(each) for name, each in phases.items()}
    parts["backward"] = length(difference(phases["backward"], window))
    left: Intervals = window
    for name, intervals in (
        ("exposed_transfer", transfer),
        ("exposed_wait", in_flight),
        ("exposed_codec", codec),
    ):
        parts[name] = length(intersection(left, intervals))
        left = difference(left, intervals)
    parts["exposed_other"] = length(left)
    parts["other"] = record.duration - sum(parts.values())
    waits = sorted(_waits(exchanges).items())
    waited_for = {late: length(difference(of, transfer)) for late, of in waits}
    return Analysed(
        record,
        rank,
        begin,
        exchanges,
        union(each.moving for each in exchanges),
        {name: parts[name] for name in PARTS},
        union=length(in_flight),
        hidden=length(difference(in_flight, window)),
        waited_for={late: of for late, of in waited_for.items() if of},
    )


def exposed_in(record: StepRecord) -> list[Interval]:
    """Intervals from the last gradient to the last mean, without other phases than backward.

    Of every backward pass: gradients of the next one are not there before the means of this one.
    """
    windows = [
        (each.last_ready, min(max(bucket.done for bucket in each.buckets), record.duration))
        for each in passes_of(record)
    ]
    others = union((each.begin, each.end) for each in record.phases if each.name in _OTHERS)
    return difference(union(windows), others)


def _waits(exchanges: Sequence[Exchange]) -> dict[int, list[Interval]]:
    """Intervals of waiting, by the rank that was waited for.

    An instant belongs to one rank: the last of the exchange that was launched first.
    """
    waits: dict[int, list[Interval]] = {}
    claimed: int | None = None
    for each in sorted(exchanges, key=lambda each: each.span.begin):
        begin, end = each.wait
        if each.last is None or begin >= end:
            continue
        # All that is claimed began earlier, so it is claimed up to its latest end.
        begin = begin if claimed is None else max(begin, claimed)
        if begin < end:
            waits.setdefault(each.last, []).append((begin, end))
            claimed = end
    return {rank: union(of) for rank, of in waits.items()}


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
        """Time at which its first bucket was ready."""
        return self.buckets[0].ready

    @property
    def last_ready(self) -> int:
        """Time at which its last bucket was ready."""
        return max(each.ready for each in self.buckets)

    def has(self, begin: int) -> bool:
        """Whether what began then, in nanoseconds of the step, is of this pass."""
        return self.begin <= begin < self.end


def passes_of(record: StepRecord) -> list[Pass]:
    """Backward passes in their order. A bucket that comes again is of the next one."""
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
