"""What a step spent its time on, on every rank, and how its exchanges lay on one time line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_dist.profiling.analysis.collectives import Exchange, begin_of, exchanges_of
from lightning_dist.profiling.analysis.intervals import (
    Interval,
    Intervals,
    difference,
    intersection,
    length,
    union,
)
from lightning_dist.profiling.analysis.parts import PARTS, Placed, StepParts, Timeline
from lightning_dist.profiling.analysis.passes import passes_of
from lightning_dist.profiling.capture.events import PHASES, Span, StepRecord
from lightning_dist.profiling.run import Run

_CODEC = ("encode", "decode")
_OTHERS = tuple(name for name in PHASES if name != "backward")


@dataclass(frozen=True)
class Analysed:
    """One step on one rank, with what its parts were made of.

    Args:
        transfer: while any exchange of this rank moved, since the begin of the step.
        moving: the same until the other members are done too.
    """

    record: StepRecord
    parts: StepParts
    exchanges: Sequence[Exchange]
    transfer: Intervals
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
    missing: set[int] = set()
    nameless = False
    for step in steps:
        for each in step.exchanges:
            missing.update(each.missing)
            nameless = nameless or (each.arrival is None and not each.missing)
    if missing:
        ranks = ", ".join(map(str, sorted(missing)))
        return f"exchanges without a record of rank {ranks} count as transfer, waiting included"
    if nameless:
        return "exchanges that do not say who takes part count as transfer, waiting included"
    return ""


def timeline(run: Run, step: int, label: str) -> Timeline:
    """A step of all ranks that have recorded it, on the clock of rank 0."""
    exchanges = exchanges_of(run, step)
    begins = {
        rank: begin_of(run, rank, step) for rank in run.ranks if step in run.ranks[rank].steps
    }
    first = min(begins.values(), default=0)
    records = {rank: run.ranks[rank].steps[step] for rank in begins}
    shifts = {rank: begin - first for rank, begin in begins.items()}
    return Timeline(
        step,
        label,
        phases={
            rank: [(each.name, each.begin + at, each.end + at) for each in records[rank].phases]
            for rank, at in shifts.items()
        },
        buckets={
            rank: [(each.index, each.ready + at, each.done + at) for each in records[rank].buckets]
            for rank, at in shifts.items()
        },
        spans={
            rank: _placed(records[rank], exchanges.get(rank, ()), at) for rank, at in shifts.items()
        },
        exposed={
            rank: [(begin + at, end + at) for begin, end in exposed_in(records[rank])]
            for rank, at in shifts.items()
        },
    )


def _placed(record: StepRecord, exchanges: Sequence[Exchange], at: int) -> list[Placed]:
    of_spans = iter(exchanges)

    def placed(span: Span) -> Placed:
        here = Placed(
            span.phase, span.bucket, span.begin + at, span.end + at, None, span.op, span.group
        )
        if span.phase != "exchange":
            return here
        each = next(of_spans)
        return replace(
            here,
            arrival=None if each.arrival is None else each.arrival + at,
            sent=span.sent,
            last=each.last,
            meeting=each.meeting,
        )

    return [placed(each) for each in record.spans] if record.detailed else []


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
    waiting = difference(under_way, transfer)
    codec = union((each.begin, each.end) for each in record.spans if each.phase in _CODEC)
    parts = {name: length(each) for name, each in phases.items()}
    parts["backward"] = length(difference(phases["backward"], window))
    left: Intervals = window
    for name, intervals in (("transfer", transfer), ("wait", waiting), ("codec", codec)):
        parts[name] = length(intersection(left, intervals))
        left = difference(left, intervals)
    parts["unattributed"] = length(left)
    parts["other"] = record.duration - sum(parts.values())
    waits = _waits(exchanges)
    return Analysed(
        record,
        StepParts(
            record.step,
            rank,
            begin,
            record.duration,
            {name: parts[name] for name in PARTS},
            union=length(under_way),
            hidden=length(difference(under_way, window)),
            waited_for=_lengths({rank: difference(of, transfer) for rank, of in waits.items()}),
            exposed_for=_lengths(
                {rank: intersection(difference(of, transfer), window) for rank, of in waits.items()}
            ),
        ),
        exchanges,
        transfer,
        union(each.moving for each in exchanges),
    )


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


def _lengths(of_ranks: Mapping[int, Intervals]) -> dict[int, int]:
    found = {rank: length(of) for rank, of in sorted(of_ranks.items())}
    return {rank: nanoseconds for rank, nanoseconds in found.items() if nanoseconds}
