"""Parts of a step: intervals of time, each in one phase.

Milliseconds are means over steps and ranks unless said otherwise; bytes are per step and rank. All
but ``Summary.step_ms`` and ``profiler_overhead`` is of the steps that were recorded in detail,
where any were. A figure that could not be measured is None, and ``unavailable`` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

from lightning_dist.profiling.analysis.metrics import MEANING_OF_PARTS
from lightning_dist.profiling.capture.events import Span
from lightning_dist.profiling.whatif.scenarios import Predictions

Interval: TypeAlias = tuple[int, int]
Intervals: TypeAlias = Sequence[Interval]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Every point that is in any of them; empty and reversed ones have no point."""
    joined: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def intersection(first: Intervals, second: Intervals) -> list[Interval]:
    """Every point that is in both unions."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(intervals: Intervals, removed: Intervals) -> list[Interval]:
    """Every point of the union ``intervals`` that is not in the union ``removed``."""
    if not intervals:
        return []
    edges = [intervals[0][0], *chain.from_iterable(removed), intervals[-1][1]]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return intersection(intervals, [(begin, end) for begin, end in gaps if begin < end])


def length(intervals: Intervals) -> int:
    """Length of a union."""
    return sum(end - begin for begin, end in intervals)


def lanes(spans: Sequence[Interval]) -> list[int]:
    """The lane of every span, as few as can be; no two of a lane overlap, though they may touch."""
    chosen = [0] * len(spans)
    free: list[int] = []  # from when on, by lane
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[index]
        assert begin <= end, f"a span ends before it begins: {spans[index]}"
        lane = next((lane for lane, since in enumerate(free) if since <= begin), len(free))
        if lane == len(free):
            free.append(end)
        free[lane] = end
        chosen[index] = lane
    return chosen


SCHEMA = 3

PARTS = tuple(MEANING_OF_PARTS)
"""They add up to the step. Communication that compute does not hide is in the parts of
:data:`EXPOSED`: between the last gradient of the backward pass and the mean of all gradients, and
where FSDP's own collectives hold up a pass. What is hidden under the backward pass is in
``backward``."""

EXPOSED = tuple(name for name in PARTS if name.startswith("exposed_"))


class TimelineSpan(Span, frozen=True, gc=False):
    """A span of a rank in a step, and what the records of other ranks say of it.

    Times are nanoseconds from the begin of the step on this rank; in a :class:`Timeline` they count
    from its begin on the first rank that began it. None: unknown, or not an exchange.

    Args:
        arrival, last: launch on the last member, and that member; the lowest of several.
        collective_id: number in the step, equal on all members.
        over: end on the last member.
        missing: members of which there is no record of it.
    """

    arrival: int | None = None
    last: int | None = None
    collective_id: int | None = None
    over: int | None = None
    missing: tuple[int, ...] = ()

    @property
    def transfer(self) -> Interval:
        """Time with all members there: it moved, or queued behind others. Unknown: all of it."""
        since = self.begin if self.arrival is None else max(self.arrival, self.begin)
        return min(since, self.end), self.end

    @property
    def wait(self) -> Interval:
        """Time from the launch to that on the last member; empty where that is not known."""
        return self.begin, self.transfer[0]

    @property
    def moving(self) -> Interval:
        """The transfer, and on until the last member is done: bytes may be on their way to it."""
        begin, end = self.transfer
        return begin, end if self.over is None else max(end, self.over)


@dataclass(frozen=True)
class Timeline:
    """One step on all ranks; times are nanoseconds, by rank.

    Args:
        label: why this step, such as ``"median step"``.
        phases: ``(name, begin, end)``.
        buckets: ``(index, ready, done)``.
        exposed: when communication was exposed, once for each backward pass.
    """

    step: int
    label: str
    phases: Mapping[int, Sequence[tuple[str, int, int]]]
    buckets: Mapping[int, Sequence[tuple[int, int, int]]]
    spans: Mapping[int, Sequence[TimelineSpan]]
    exposed: Mapping[int, Intervals] = field(default_factory=dict)


@dataclass(frozen=True)
class RankSummary:
    """One rank, of the steps that the parts are of.

    Args:
        wait_ms: waiting for others, per step, hidden or not.
        waited_for_ms: waiting of the others for this rank, per step, added up over them.
        clock_uncertainty_ms: at the worst detailed step.
        intra_gbps, inter_gbps: bytes sent over the time with an exchange in flight.
        phases_ms: as in ``Summary.breakdown_ms``; empty: not recorded.
    """

    rank: int
    node: str
    step_ms: float
    exposed_ms: float | None
    wait_ms: float | None
    waited_for_ms: float | None
    clock_uncertainty_ms: float | None = None
    intra_gbps: float | None = None
    inter_gbps: float | None = None
    phases_ms: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class PhaseSkew:
    """A phase in which ranks differ by more than waiting in exchanges explains.

    Args:
        ranks: those slower than the fastest by more than half of ``excess_ms``, the slowest first.
        excess_ms: difference between the slowest and the fastest rank, per step.
    """

    phase: str
    ranks: Sequence[int]
    fastest_rank: int
    excess_ms: float


@dataclass(frozen=True)
class BucketSummary:
    """One bucket. ``exposed_ms``: from the last gradient of the step to the end of its exchange."""

    index: int
    codec: str
    raw_mb: float
    wire_mb: float
    ready_ms: float
    encode_ms: float | None
    wait_ms: float | None
    transfer_ms: float
    decode_ms: float | None
    exposed_ms: float


@dataclass(frozen=True)
class Traffic:
    """Bytes per step and rank, and rates in Gbit/s over the union of exchanges without waiting.

    An exchange lasts until its last member is done.

    Args:
        wire_gbps: what all ranks of a node sent to other nodes, the mean over nodes: comparable
            with the link. On a single node what a rank sent.
        ddp_equivalent_busbw_gbps: bus bandwidth at which uncompressed DDP would take this time.
        link_gbps: the best that was measured of an idle link.
    """

    raw_bytes: float
    wire_bytes: float
    intra_bytes: float
    inter_bytes: float
    wire_gbps: float | None = None
    ddp_equivalent_busbw_gbps: float | None = None
    link_gbps: float | None = None

    @property
    def compression_ratio(self) -> float:
        """Bytes of uncompressed DDP over those that were sent."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def link_utilization(self) -> float | None:
        """Share of ``link_gbps``, 0 to 1."""
        if self.wire_gbps is None or not self.link_gbps:
            return None
        return self.wire_gbps / self.link_gbps


@dataclass(frozen=True)
class PerStep:
    """Values of the steps that all ranks have recorded, for pictures over time.

    Args:
        breakdown_ms: by part, the mean over ranks.
        wait_ms: by rank, hidden or not.
        sent_mb: by a rank, the mean over ranks.
    """

    steps: Sequence[int]
    step_ms: Sequence[float]
    breakdown_ms: Mapping[str, Sequence[float]]
    wait_ms: Mapping[int, Sequence[float]]
    sent_mb: Sequence[float] = ()


@dataclass(frozen=True)
class Summary:
    """A profile in numbers; ``summary.json`` is this.

    Args:
        run: what ran, as of rank 0: codec, backend, device, node of every rank, versions.
        warmup_steps: first steps that were left out: buckets are not built yet.
        step_ms: ``"mean"``, ``"median"`` and ``"p95"`` of all steps.
        breakdown_ms: of ``detailed_steps`` of them; shares are of ``detailed_step_ms``, their
            mean, which is the sum of the parts.
        overlap_fraction: hidden share of the time in which an exchange was under way, 0 to 1.
        straggler: the rank that others wait for, if it is clearly one
            (:mod:`~lightning_dist.profiling.analysis.imbalance`).
        profiler_overhead: share of the time that the profiler took.
        errors: compression errors, ``"rank"`` and the fields of
            :class:`~lightning_dist.profiling.capture.events.ErrorRecord`.
        links: ``{"rank", "peer", "group", "sent", "seconds"}`` each.
        unavailable: by field, why it is None; ``steps``: why there are none, and what helps.
        phase_skew: phases in which ranks differ, and do not wait for each other in exchanges.
        exposed_fsdp_ms: of ``exposed_ms``, in collectives that FSDP calls itself; the rest is
            between its replicas. On an accelerator these are not in ``exposed_ms``, and this is 0.
        generations: changes of members within the process: ``{"number", "step", "reason"}``.
    """

    headline: str
    run: Mapping[str, Any]
    steps: int
    warmup_steps: int
    step_ms: Mapping[str, float | None]
    breakdown_ms: Mapping[str, float | None]
    exposed_ms: float | None
    hidden_ms: float | None
    overlap_fraction: float | None
    traffic: Traffic | None
    ranks: Sequence[RankSummary]
    buckets: Sequence[BucketSummary]
    straggler: int | None
    profiler_overhead: float | None
    per_step: PerStep
    errors: Sequence[Mapping[str, Any]] = ()
    links: Sequence[Mapping[str, Any]] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    predictions: Predictions | None = None
    detailed_steps: int = 0
    phase_skew: Sequence[PhaseSkew] = ()
    exposed_fsdp_ms: float | None = None
    generations: Sequence[Mapping[str, Any]] = ()

    @property
    def detailed_step_ms(self) -> float | None:
        """Mean of the detailed steps, the sum of their parts; None: no part is known."""
        known = [value for value in self.breakdown_ms.values() if value is not None]
        return sum(known) if known else None

    @property
    def is_of_all(self) -> bool:
        """All ranks of the run are in it."""
        return len(self.ranks) >= int(self.run.get("world_size", 0))

    @property
    def exposed_fraction(self) -> float | None:
        """Exposed share, 0 to 1, of the detailed steps."""
        if self.exposed_ms is None:
            return None
        return self.exposed_ms / (self.detailed_step_ms or 1.0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        content = {"schema": SCHEMA, **asdict(replace(self, predictions=None))}
        content["detailed_step_ms"] = self.detailed_step_ms
        content["exposed_fraction"] = self.exposed_fraction
        if (traffic := self.traffic) is not None:
            content["traffic"]["compression_ratio"] = traffic.compression_ratio
            content["traffic"]["link_utilization"] = traffic.link_utilization
        if self.predictions is not None:
            content["predictions"] = self.predictions.as_dict()
        return content
