"""What a profile says: the parts of a step, and a summary of all steps. Types only.

Milliseconds are means over steps and ranks unless said otherwise; bytes are per step and rank; a
figure that could not be measured is None, and ``unavailable`` says why. All but
``Summary.step_ms`` and ``profiler_overhead`` is of the steps that were recorded in detail, where
any were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from lightning_dist.profiling.analysis.intervals import Intervals
from lightning_dist.profiling.whatif.predictions import Predictions

SCHEMA = 2

PARTS = (
    "between_steps",
    "forward",
    "backward",
    "exposed_wait",
    "exposed_transfer",
    "exposed_codec",
    "exposed_other",
    "optimizer",
    "other",
)
"""They add up to the step. Communication that compute does not hide is in the parts of
:data:`EXPOSED`: between the last gradient of the backward pass and the mean of all gradients. What
is hidden under the backward pass is in ``backward``."""

EXPOSED = ("exposed_wait", "exposed_transfer", "exposed_codec", "exposed_other")


class Unavailable(StrEnum):
    """Reasons why a figure is None; what is in braces is filled in where one is given."""

    NO_STEP = "no rank has recorded a step"
    KILLED = "the training was killed in its first second, or has not made a step yet"
    ENDED = "the training ended before its first step was over"
    NO_OPTIMIZER_STEP = (
        "no optimizer has made a step with parameters of the model; profile a training that makes "
        "a few"
    )
    NO_COMMON_STEP = "no step is recorded on all ranks"
    NO_DETAIL = "no step is recorded in detail on all ranks"
    NO_STEP_OF_RANK = (
        "no step of rank {ranks} is there: what it has sent is not known, and waiting for it "
        "counts as transfer"
    )
    NO_RECORD = "exchanges without a record of rank {ranks} count as transfer, waiting included"
    NO_MEMBERS = "exchanges that do not say who takes part count as transfer, waiting included"
    NO_BUCKET = "no bucket of gradients was seen, nor an exchange"
    NO_EXCHANGE = "no exchange was recorded"
    NO_LINK = "no link was measured"
    NOT_SENT = "no bucket of gradients was sent"
    NOT_SAMPLED = "none was sampled"
    NOT_COMPRESSED = "nothing is compressed"
    STOCK = "DDP itself exchanges the gradients, without a codec"
    ALONE = "one rank exchanges nothing"
    ALONE_SENDS = "one rank sends nothing"
    IN_BACKWARD = "the passes ran within each other; both are in backward"
    NO_WAITING = "no rank waited"
    LITTLE_WAITING = "waiting is {share:.1%} of the step"
    NOT_MOST = "no rank is clearly the last: only {share:.0%} of it is for rank {rank}, the most"
    UNCERTAIN = (
        "no rank is clearly the last: clocks are no more certain than what rank {rank} was late"
    )
    CHANCE = (
        "no rank is clearly the last: rank {rank} was late in too few steps to tell it from chance"
    )
    UNEVEN = "ranks are uneven outside of exchanges too, and by more"


@dataclass(frozen=True)
class StepParts:
    """One step on one rank, in nanoseconds.

    Args:
        begin: on rank 0's clock.
        parts: by name, all of :data:`PARTS`; their sum is ``duration``.
        union: how long any exchange was under way on this rank.
        hidden: how much of that was before the last gradient was there.
        waited_for: nanoseconds of ``wait`` and of hidden waiting by the rank that came last.
        exposed_for: the same of ``wait`` alone.
    """

    step: int
    rank: int
    begin: int
    duration: int
    parts: Mapping[str, int]
    union: int
    hidden: int
    waited_for: Mapping[int, int]
    exposed_for: Mapping[int, int] = field(default_factory=dict)

    @property
    def exposed(self) -> int:
        """What compute did not hide."""
        return sum(self.parts[name] for name in EXPOSED)


@dataclass(frozen=True)
class TimelineSpan:
    """A span on the time line of a step that all ranks share, in nanoseconds.

    It counts from the begin of the step on the first rank that began it.

    Args:
        arrival: of an exchange, when the last member had come to it.
        last: that member.
        collective_id: of an exchange, its number in the step, equal on all members; None: unknown.
    """

    phase: str
    bucket: int
    begin: int
    end: int
    arrival: int | None = None
    op: str = ""
    group: str = ""
    sent: int = 0
    last: int | None = None
    collective_id: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One step on all ranks.

    Args:
        label: why this step, such as ``"median step"``.
        phases: by rank: ``(name, begin, end)``.
        buckets: by rank: ``(index, ready, done)``.
        spans: by rank, in the order in which they began.
        exposed: by rank: when communication was exposed, once for each backward pass.
    """

    step: int
    label: str
    phases: Mapping[int, Sequence[tuple[str, int, int]]]
    buckets: Mapping[int, Sequence[tuple[int, int, int]]]
    spans: Mapping[int, Sequence[TimelineSpan]]
    exposed: Mapping[int, Intervals] = field(default_factory=dict)


@dataclass(frozen=True)
class RankSummary:
    """One rank.

    Args:
        step_ms: of the steps that the parts are of.
        wait_ms: it waited for others, per step, hidden or not.
        waited_for_ms: others waited for it, per step, added up over them.
        clock_uncertainty_ms: of its clock, at the worst step; None: never compared.
        intra_gbps, inter_gbps: what it sent over the time something was under way.
        phases_ms: ``data``, ``forward``, ``backward`` and ``optimizer`` as they are in
            ``Summary.breakdown_ms``; empty: not recorded.
    """

    rank: int
    host: str
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
    """A phase in which ranks differ, and waiting in exchanges does not say why.

    Args:
        ranks: that it takes longer, the longest first: by more than half of ``excess_ms``.
        fastest_rank: the rank that it takes shortest.
        excess_ms: by so much the longest, per step.
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

    An exchange lasts until its last member is done: until then bytes may be on their way to it.

    Args:
        wire_gbps: what all ranks of a host sent to other hosts, the mean over hosts: comparable
            with the link. On a single host what a rank sent.
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
        """How many times fewer bytes than uncompressed DDP."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def link_utilization(self) -> float | None:
        """Of the calibrated peak; 1.0 is all of it."""
        if self.wire_gbps is None or not self.link_gbps:
            return None
        return self.wire_gbps / self.link_gbps


@dataclass(frozen=True)
class PerStep:
    """One value per step that all ranks have recorded, for pictures over time.

    Args:
        breakdown_ms: by part, the mean over ranks.
        wait_ms: by rank, hidden or not.
        slowest: the rank that most waiting was for; None: there was none.
    """

    steps: Sequence[int]
    step_ms: Sequence[float]
    breakdown_ms: Mapping[str, Sequence[float]]
    wait_ms: Mapping[int, Sequence[float]]
    slowest: Sequence[int | None]


@dataclass(frozen=True)
class Summary:
    """A profile in numbers; ``summary.json`` is this.

    Args:
        headline: the most important in one or two sentences.
        run: what ran, as of rank 0: codec, backend, device, host of every rank, versions.
        warmup_steps: first steps that were left out: buckets are not built yet.
        step_ms: of all steps; None: there is none.
        breakdown_ms: of ``detailed_steps`` of them; every share of a part is of
            ``detailed_step_ms``, their mean, which is the sum of the parts. None: not measured.
        overlap_fraction: hidden share of the time in which an exchange was under way, 0 to 1.
        straggler: the rank that others wait for, if it is clearly one
            (:mod:`~lightning_dist.profiling.analysis.imbalance`).
        exposed_straggler: the same of exposed waiting alone, however little there is.
        profiler_overhead: share of the time that the profiler took.
        errors: per step and bucket: ``{"step", "bucket", "rank", "relative_l2", "cosine",
            "residual_ratio"}``, as in
            :class:`~lightning_dist.profiling.capture.events.ErrorRecord`.
        links: ``{"rank", "peer", "group", "sent", "seconds"}`` each.
        unavailable: by field, why it is None; ``steps``: why there are none, and what helps.
        notes: what is missing or odd.
        predictions: what is predicted of other settings.
        phase_skew: phases in which ranks differ, and do not wait for each other in exchanges
            (:mod:`~lightning_dist.profiling.analysis.imbalance`).
    """

    headline: str
    run: Mapping[str, Any]
    steps: int
    warmup_steps: int
    step_ms: Mapping[str, float | None]  # "mean", "median", "p95"
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
    exposed_straggler: int | None = None
    predictions: Predictions | None = None
    detailed_steps: int = 0
    phase_skew: Sequence[PhaseSkew] = ()

    @property
    def detailed_step_ms(self) -> float | None:
        """The mean of the steps that the parts are of: their sum. None: no part is known."""
        known = [value for value in self.breakdown_ms.values() if value is not None]
        return sum(known) if known else None

    @property
    def is_of_all(self) -> bool:
        """Whether it is of all ranks of the run."""
        return len(self.ranks) >= int(self.run.get("world_size", 0))

    @property
    def exposed(self) -> float | None:
        """Exposed share, 0 to 1, of the steps that were looked at in detail."""
        if self.exposed_ms is None:
            return None
        return self.exposed_ms / (self.detailed_step_ms or 1.0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        content = {"schema": SCHEMA, **asdict(replace(self, predictions=None))}
        content["detailed_step_ms"] = self.detailed_step_ms
        if self.traffic is not None:
            content["traffic"]["compression_ratio"] = self.traffic.compression_ratio
        if self.predictions is not None:
            content["predictions"] = self.predictions.as_dict()
        return content
