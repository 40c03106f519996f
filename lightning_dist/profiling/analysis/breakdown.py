"""Collectives matched over ranks, and the parts of a step on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import astuple, replace

from lightning_dist.profiling.analysis.parts import (
    EXPOSED,
    PARTS,
    Interval,
    Intervals,
    Timeline,
    TimelineSpan,
    difference,
    intersection,
    length,
    union,
)
from lightning_dist.profiling.capture.events import OF_NO_BUCKET, PHASES, BucketTimes, StepRecord
from lightning_dist.profiling.run import Run

_CODEC = ("encode", "decode")
_OTHERS = tuple(name for name in PHASES if name != "backward")


@dataclass(frozen=True)
class Analysed:
    """A step on one rank. Durations are nanoseconds, intervals count from its begin.

    Args:
        begin: on rank 0's clock.
        inter_moving: while any exchange with other nodes moved, until all its members were done.
        ns: :data:`PARTS`, which add up to the duration, and the other columns of
            :class:`~lightning_dist.profiling.analysis.tables.StepTable`.
        waited_for: waiting, hidden or not, by the rank that came last.
    """

    record: StepRecord
    rank: int
    begin: int
    spans: Sequence[TimelineSpan]
    inter_moving: Intervals
    ns: Mapping[str, int]
    waited_for: Mapping[int, int]

    @property
    def duration(self) -> int:
        """Duration of the step."""
        return self.record.duration

    @property
    def parts(self) -> dict[str, int]:
        """Parts of the step, by name; they add up to ``duration``."""
        return {name: self.ns[name] for name in PARTS}

    @property
    def exchanges(self) -> list[TimelineSpan]:
        """Collectives, in their order."""
        return [span for span in self.spans if span.phase == "exchange"]


def begin_of(run: Run, rank: int, step: int) -> int:
    """Begin of a step on a rank, on rank 0's clock: one offset for all of a step."""
    of_rank = run.ranks[rank]
    begin = of_rank.head(step).begin
    return begin + of_rank.offset(begin)


def spans_of(run: Run, step: int) -> dict[int, list[TimelineSpan]]:
    """Spans of every rank that has recorded the step in detail, in their order.

    The same collective has the same group and order on all its members. Groups of one name are the
    same if their ranks are.
    """
    records = {
        rank: rank_run.steps[step]
        for rank, rank_run in run.ranks.items()
        if step in rank_run.steps and rank_run.head(step).detailed
    }
    spans = {
        rank: [TimelineSpan(*astuple(span)) for span in record.spans]
        for rank, record in records.items()
    }
    groups: dict[tuple[str, tuple[int, ...]], int] = {}  # their numbers in this step
    collectives: dict[tuple[int, int], dict[int, int]] = {}  # index of the span on every rank
    for rank, record in records.items():
        numbers = {
            name: groups.setdefault((name, tuple(members)), len(groups))
            for name, members in run.ranks[rank].metadata.groups.items()
        }
        for index, span in enumerate(record.spans):
            if span.phase == "exchange" and span.group in numbers and span.order >= 0:
                collectives.setdefault((numbers[span.group], span.order), {})[rank] = index
    begins = {rank: begin_of(run, rank, step) for rank in records}
    clocks = {rank: run.clock_of(rank) for rank in records}
    members = [ranks for _, ranks in groups]
    for number, ((group, _), indices) in enumerate(collectives.items()):
        of_members = {rank: spans[rank][index] for rank, index in indices.items()}
        if missing := tuple(rank for rank in members[group] if rank not in indices):
            known = {rank: {"missing": missing} for rank in indices}
        else:
            known = _arrivals(of_members, begins, clocks)
        for rank, index in indices.items():
            spans[rank][index] = replace(of_members[rank], collective_id=number, **known[rank])
    return spans


def _arrivals(
    spans: Mapping[int, TimelineSpan], begins: Mapping[int, int], clocks: Mapping[int, Hashable]
) -> dict[int, dict[str, Any]]:
    """Fields of a collective on every member, from begins of the step on rank 0's clock."""
    if len(spans) > 1 and None in {clocks[rank] for rank in spans}:
        # Without clocks: all leave a collective together, so who took longer has waited.
        begins = {rank: -span.end for rank, span in spans.items()}
    launches = {rank: begins[rank] + span.begin for rank, span in spans.items()}
    arrival = max(launches.values())
    last = min(rank for rank, launch in launches.items() if launch == arrival)
    over = max(begins[rank] + span.end for rank, span in spans.items())
    return {
        rank: {"arrival": arrival - begins[rank], "over": over - begins[rank], "last": last}
        for rank in spans
    }


def analyse(run: Run, step: int) -> list[Analysed]:
    """A step on every rank that has recorded it in detail.

    Where members of a collective have left no record of it, waiting for it is not known and all of
    it counts as transfer; :func:`unknown_wait` says so.
    """
    return [_analyse(run, rank, step, spans) for rank, spans in spans_of(run, step).items()]


def unknown_wait(steps: Iterable[Analysed]) -> str:
    """Reason why waiting is not, or not wholly, known; empty if it is."""
    exchanges = [exchange for step in steps for exchange in step.exchanges]
    if missing := sorted(set[int]().union(*(span.missing for span in exchanges))):
        ranks = ", ".join(map(str, missing))
        return f"exchanges without a record of rank {ranks} count as transfer, waiting included"
    if any(span.arrival is None for span in exchanges):
        return "exchanges without recorded members count as transfer, waiting included"
    return ""


def timeline(run: Run, step: int, label: str) -> Timeline:
    """A step of all ranks that have recorded it, on the clock of rank 0."""
    analysed = spans_of(run, step)
    ranks = [rank for rank, rank_run in run.ranks.items() if step in rank_run.steps]
    begins = {rank: begin_of(run, rank, step) for rank in ranks}
    phases, buckets, spans, exposed = {}, {}, {}, {}
    for rank, begin in begins.items():
        at, record = begin - min(begins.values()), run.ranks[rank].steps[step]
        phases[rank] = [(phase.name, phase.begin + at, phase.end + at) for phase in record.phases]
        buckets[rank] = [(b.index, b.ready + at, b.done + at) for b in record.buckets]
        spans[rank] = [_shifted(span, at) for span in analysed.get(rank, ())]
        exposed[rank] = [(since + at, until + at) for since, until in exposed_in(record)]
    return Timeline(step, label, phases, buckets, spans, exposed)


def _shifted(span: TimelineSpan, by: int) -> TimelineSpan:
    times = {name: getattr(span, name) for name in ("begin", "end", "arrival", "over")}
    return replace(span, **{name: at + by for name, at in times.items() if at is not None})


def _analyse(run: Run, rank: int, step: int, spans: Sequence[TimelineSpan]) -> Analysed:
    record = run.ranks[rank].steps[step]
    exchanges = [span for span in spans if span.phase == "exchange"]
    phases = {
        name: union((phase.begin, phase.end) for phase in record.phases if phase.name == name)
        for name in PHASES
    }
    window = exposed_in(record)
    blocked = blocked_in(record)
    transfer = union(span.transfer for span in exchanges)
    in_flight = union((span.begin, span.end) for span in exchanges)
    codec = union((span.begin, span.end) for span in spans if span.phase != "exchange")
    parts = {name: length(difference(intervals, window)) for name, intervals in phases.items()}
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
    waits = {late: difference(wait, transfer) for late, wait in sorted(_waits(exchanges).items())}
    waited_for = {late: length(wait) for late, wait in waits.items() if wait}
    intra, inter = _reach(run, rank)
    inter_moving = union(span.moving for span in exchanges if span.group in inter)
    own_bytes = _own_bytes(run, rank, record)
    ns = {
        **parts,
        "duration": record.duration,
        "exposed": sum(parts[name] for name in EXPOSED),
        "exposed_fsdp": length(blocked) if run.ranks[rank].metadata.fsdp else 0,
        "exchange": length(in_flight),
        "hidden": length(difference(in_flight, window)),
        "waited": sum(waited_for.values()),
        "moving": length(union(span.moving for span in exchanges)),
        "intra_moving": length(union(span.moving for span in exchanges if span.group in intra)),
        "inter_moving": length(inter_moving),
        "raw": raw_of(record),
        "intra": sum(bucket.intra for bucket in record.buckets) + own_bytes[0],
        "inter": sum(bucket.inter for bucket in record.buckets) + own_bytes[1],
        "exchanges": len(exchanges),
        **{name: sum(s.end - s.begin for s in spans if s.phase == name) for name in _CODEC},
        "after": min((max(record.duration - b.done, 0) for b in record.buckets), default=0),
        "moved": sum(span.transfer[1] - span.transfer[0] for span in exchanges),
        "uncertainty": run.ranks[rank].uncertainty(record.begin) or 0,
        "passes": len(passes_of(record)),
        "optimizer_steps": any(phase.name == "optimizer" for phase in record.phases),
    }
    begin = begin_of(run, rank, step)
    return Analysed(record, rank, begin, spans, inter_moving, ns, waited_for)


def exposed_in(record: StepRecord) -> list[Interval]:
    """Intervals from the last gradient to the last mean, without other phases than backward.

    Of every backward pass: gradients of the next one are not there before the means of this one.
    And :func:`blocked_in`, of any phase.
    """
    windows = [
        (
            max(bucket.ready for bucket in buckets),
            min(max(bucket.done for bucket in buckets), record.duration),
        )
        for buckets in passes_of(record)
    ]
    others = union((phase.begin, phase.end) for phase in record.phases if phase.name in _OTHERS)
    return union([*difference(union(windows), others), *blocked_in(record)])


def blocked_in(record: StepRecord) -> list[Interval]:
    """Intervals in which the thread that trains waits: for FSDP's collectives or local updates'."""
    return union((max(s.begin, 0), min(s.end, record.duration)) for s in record.spans if s.blocks)


def _waits(exchanges: Sequence[TimelineSpan]) -> dict[int, list[Interval]]:
    """Intervals of waiting, by the rank that was waited for.

    An instant belongs to one rank: the last of the exchange that was launched first.
    """
    waits: dict[int, list[Interval]] = {}
    claimed: int | None = None
    for exchange in sorted(exchanges, key=lambda span: span.begin):
        begin, end = exchange.wait
        if exchange.last is None or begin >= end:
            continue
        # All that is claimed began earlier, so it is claimed up to its latest end.
        begin = begin if claimed is None else max(begin, claimed)
        if begin < end:
            waits.setdefault(exchange.last, []).append((begin, end))
            claimed = end
    return {rank: union(intervals) for rank, intervals in waits.items()}


def raw_of(record: StepRecord) -> int:
    """Bytes that this rank would send uncompressed, also in collectives that FSDP calls itself."""
    of_fsdp = (span.raw or span.sent for span in record.spans if span.bucket == OF_NO_BUCKET)
    return sum(bucket.raw for bucket in record.buckets) + sum(of_fsdp)


def _own_bytes(run: Run, rank: int, record: StepRecord) -> tuple[int, int]:
    """Bytes of collectives that FSDP calls itself: within the node, and to others. Of a ring."""
    sent, groups = [0, 0], run.ranks[rank].metadata.groups
    for span in record.spans:
        if span.bucket == OF_NO_BUCKET and span.phase == "exchange":
            ranks = groups[span.group]
            following = run.ranks.get(ranks[(ranks.index(rank) + 1) % len(ranks)])
            node = run.ranks[rank].metadata.node
            crosses = following is not None and following.metadata.node != node
            sent[crosses] += span.sent
    return sent[0], sent[1]


def _reach(run: Run, rank: int) -> tuple[set[str], set[str]]:
    """Groups of a rank with others of its node, and those with other nodes.

    A rank that has left nothing may be anywhere.
    """
    nodes, groups = run.nodes, run.ranks[rank].metadata.groups
    others = {name: {nodes.get(m) for m in ranks if m != rank} for name, ranks in groups.items()}
    intra = {name for name, reached in others.items() if reached & {nodes[rank], None}}
    return intra, {name for name, reached in others.items() if reached - {nodes[rank]}}


def passes_of(record: StepRecord) -> list[list[BucketTimes]]:
    """Buckets of every backward pass, as they became ready: one that comes again is of the next."""
    passes: list[list[BucketTimes]] = []
    seen: set[int] = set()
    for bucket in record.buckets:
        if not passes or bucket.index in seen:
            passes.append([])
            seen.clear()
        passes[-1].append(bucket)
        seen.add(bucket.index)
    return passes
