"""What a step spent its time on, on every rank, and how its exchanges lay on one time line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
from lightning_dist.profiling.analysis.parts import (
    PARTS,
    StepParts,
    Timeline,
    TimelineSpan,
    Unavailable,
)
from lightning_dist.profiling.capture.events import PHASES, BucketTimes, StepRecord
from lightning_dist.profiling.run import Run

_CODEC = ("encode", "decode")
_OTHERS = tuple(name for name in PHASES if name != "backward")


@dataclass(frozen=True)
class Analysed:
    """One step on one rank, with what its parts were made of.

    Args:
        moving: while any exchange of this rank moved, until all its members were done; since the
            begin of the step.
    """

    record: StepRecord
    parts: StepParts
    exchanges: Sequence[Exchange]
    moving: Intervals


def parts_of(run: Run, step: int) -> list[StepParts]:
    """The parts of a step on every rank that has recorded it in detail.

    Where members of a collective have left no record of it, waiting for it is not known and all of
    it counts as transfer; :func:`unknown_wait` says so.
    """
    return [each.parts for each in analyse(run, step)]


def analyse(run: Run, step: int) -> list[Analysed]:
    """The same, with what the parts were made of."""
    return [
        _analyse(run.ranks[rank].steps[step], exchanges, rank=rank, begin=begin_of(run, rank, step))
        for rank, exchanges in exchanges_of(run, step).items()
    ]


def unknown_wait(steps: Iterable[Analysed]) -> str:
    """Why waiting is not, or not wholly, known; empty if it is."""
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
        spans[rank] = _placed(record, exchanges.get(rank, ()), at)
        exposed[rank] = [(since + at, until + at) for since, until in exposed_in(record)]
    return Timeline(step, label, phases, buckets, spans, exposed)


def _placed(record: StepRecord, exchanges: Sequence[Exchange], at: int) -> list[TimelineSpan]:
    found = []
    of_spans = iter(exchanges)
    for span in record.spans if record.detailed else ():
        placed = TimelineSpan(
            span.phase, span.bucket, span.begin + at, span.end + at, None, span.op, span.group
        )
        if span.phase == "exchange":
            each = next(of_spans)
            arrival = None if each.arrival is None else each.arrival + at
            placed = replace(
                placed,
                arrival=arrival,
                sent=span.sent,
                last=each.last,
                collective_id=each.collective_id,
            )
        found.append(placed)
    return found


def _analyse(
    record: StepRecord, exchanges: Sequence[Exchange], *, rank: int, begin: int
) -> Analysed:
    phases = {
        name: union((each.begin, each.end) for each in record.phases if each.name == name)
        for name in PHASES
    }
    window = exposed_in(record)
    transfer = union(each.transfer for each in exchanges)
    under_way = union((each.span.begin, each.span.end) for each in exchanges)
    codec = union((each.begin, each.end) for each in record.spans if each.phase in _CODEC)
    parts = {name: length(each) for name, each in phases.items()}
    parts["backward"] = length(difference(phases["backward"], window))
    left: Intervals = window
    for name, intervals in (
        ("exposed_transfer", transfer),
        ("exposed_wait", under_way),
        ("exposed_codec", codec),
    ):
        parts[name] = length(intersection(left, intervals))
        left = difference(left, intervals)
    parts["exposed_other"] = length(left)
    parts["other"] = record.duration - sum(parts.values())
    waits = {late: difference(of, transfer) for late, of in sorted(_waits(exchanges).items())}
    waited_for = {late: length(of) for late, of in waits.items()}
    exposed_for = {late: length(intersection(of, window)) for late, of in waits.items()}
    found = StepParts(
        record.step,
        rank,
        begin,
        record.duration,
        {name: parts[name] for name in PARTS},
        union=length(under_way),
        hidden=length(difference(under_way, window)),
        waited_for={late: of for late, of in waited_for.items() if of},
        exposed_for={late: of for late, of in exposed_for.items() if of},
    )
    return Analysed(record, found, exchanges, union(each.moving for each in exchanges))


def exposed_in(record: StepRecord) -> list[Interval]:
    """From the last gradient to the last mean, where no phase is but the backward pass.

    Of every backward pass: gradients of the next one are not there before the means of this one.
    """
    windows = [
        (each.last_ready, min(max(bucket.done for bucket in each.buckets), record.duration))
        for each in passes_of(record)
    ]
    others = union((each.begin, each.end) for each in record.phases if each.name in _OTHERS)
    return difference(union(windows), others)


def _waits(exchanges: Sequence[Exchange]) -> dict[int, list[Interval]]:
    """By the rank that was waited for.

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
