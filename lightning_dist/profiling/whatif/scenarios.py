"""Scenarios of a prediction, and how they are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from lightning_dist.measurement import CANDIDATES
from lightning_dist.profiling.analysis.metrics import count, format_value
from lightning_dist.profiling.capture.events import GLOO_AT_ONCE

DDP = "ddp"
"""Stock DDP in the place of a codec."""

FORMS = FLAT, HIERARCHICAL, LEADER = "flat", "hierarchical", "leader"

FSDP = "fsdp"
"""Form of a model that ``fully_shard`` has sharded, with a replica on each node."""

ALL_RANKS = "all_ranks"
"""Form of a model that ``fully_shard`` has sharded over all ranks. :data:`DDP` is FSDP as it is."""

SHARD_CANDIDATES = {"parameters": ("none", "int8"), "gradients": ("none", "int8", "int4")}
"""Default codecs of predictions for it."""

PAYLOAD = 1448 / 1514
"""Share of a link's rate that TCP leaves to its payload, with frames of 1,514 bytes."""

ELEMENT_BYTES = 4
"""Bytes of a gradient element."""


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of one level of the network.

    Args:
        rate: payload bytes per second in one direction: of a node between nodes, of a rank inside.
        latency: seconds of a round; None: unknown, and rounds count nothing.
        overhead: least seconds between two collectives, however small.
        cpu: seconds of a core that a collective takes.
    """

    rate: float
    latency: float | None = None
    overhead: float = 0.0
    cpu: float = 0.0

    @property
    def gbps(self) -> float:
        """Rate in Gbit/s, headers included."""
        return self.rate * 8e-9 / PAYLOAD


def rate_of(gbps: float) -> float:
    """Payload bytes per second of a link of this rate, headers included."""
    return gbps * 1e9 / 8 * PAYLOAD


@dataclass(frozen=True)
class Scenario:
    """Exchange of gradients to simulate.

    Args:
        codec: name, or :data:`DDP`.
        form: one of :data:`FORMS`, :data:`FSDP` or :data:`ALL_RANKS`.
        counts: ranks of every node.
        link: between nodes; inside the node where there is only one.
        inside: inside a node; None: unknown.
        at_once: collectives of a group that run at once; 1 with NCCL, which has one stream.
        immediate: a bucket is decoded while the next one travels, not when all have landed.
        sync_every: local steps between two exchanges of what has changed; 0: gradients are
            exchanged in every step.
        fragments: parts of the model that are exchanged in turn, each every ``sync_every`` steps.
        overlap_steps: local steps that an exchange has before training waits for it.
        parameters: codec of the parameters that FSDP gathers, where the form is :data:`ALL_RANKS`.

    Raises:
        ValueError: an unknown form, or local steps that cannot be.
    """

    codec: str
    form: str
    counts: tuple[int, ...]
    link: LinkSpeed
    inside: LinkSpeed | None = None
    at_once: int = GLOO_AT_ONCE
    immediate: bool = False
    sync_every: int = 0
    fragments: int = 1
    overlap_steps: int = 0
    parameters: str = ""

    def __post_init__(self) -> None:
        if self.form not in (*FORMS, FSDP, ALL_RANKS):
            known = ", ".join((*FORMS, FSDP, ALL_RANKS))
            raise ValueError(f"form must be one of {known}, got {self.form!r}")
        if self.sync_every < 0:
            raise ValueError(f"sync_every must be 1 or more local steps, got {self.sync_every}")
        if self.fragments < 1 or self.sync_every % self.fragments:
            raise ValueError(
                "Local steps must be a multiple of fragments, which take turns at equal intervals, "
                f"got {self.sync_every} local steps and {self.fragments} fragments"
            )
        if not 0 <= self.overlap_steps < max(self.interval, 1):
            raise ValueError(
                "overlap_steps must be 0 or more and less than local steps / fragments, so that "
                f"one exchange is under way at a time, got {self.overlap_steps} and "
                f"{self.sync_every} / {self.fragments} = {self.interval}"
            )

    @property
    def interval(self) -> int:
        """Local steps between two exchanges, of any fragments."""
        return self.sync_every // self.fragments

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.counts)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(self.counts)

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks behind each link of the exchange. On a single node each rank has its own."""
        if self.form not in (FLAT, ALL_RANKS):
            return (1,) * self.nodes
        return self.counts if self.nodes > 1 else (1,) * self.world_size

    @property
    def adds_inside(self) -> bool:
        """Whether gradients are added up inside nodes, within the exchange itself."""
        return self.form in (HIERARCHICAL, LEADER)

    @property
    def unsupported(self) -> str:
        """Reason why the scenario cannot run or be simulated; empty if it can."""
        if not self.adds_inside:
            return ""
        reasons = {
            "DDP itself is not hierarchical": self.codec == DDP,
            "one rank per node: nothing is reduced inside a node": max(self.counts) == 1,
            "one node: nothing crosses between nodes": self.nodes == 1,
            "the nodes hold different numbers of ranks, which needs the leader form": (
                self.form == HIERARCHICAL and len(set(self.counts)) > 1
            ),
            "no exchange inside a node was measured; give its rate with --inside-gbps": (
                self.inside is None
            ),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(frozen=True)
class ShardCollective:
    """Collective of FSDP for a parameter group that is sharded over all ranks.

    Args:
        gathers: parameters; otherwise it reduces and scatters gradients.
        compute: seconds since the one before it, without codecs, until the last rank launches it.
        elements: of the group, on all ranks together.
        itemsize: bytes of an element that is not compressed.
    """

    gathers: bool
    compute: float
    elements: float
    itemsize: float = ELEMENT_BYTES


@dataclass(frozen=True)
class ScenarioBucket:
    """Bucket of gradients: seconds from the begin of the step until it is ready, and elements.

    Of a sharded model: a parameter group, and the elements of the shard of a rank.
    """

    ready: float
    elements: float


def elsewhere(
    run: Scenario,
    *,
    nodes: int | None = None,
    link_gbps: float | None = None,
    inside_gbps: float | None = None,
    latency_us: float | None = None,
) -> Scenario:
    """Scenario of a run on other links and nodes; None: as in the run. Rates include headers.

    Args:
        nodes: number, each with as many ranks as the largest node of the run.
        link_gbps, inside_gbps: of a node's link, and of a rank inside its node.
        latency_us: microseconds of a round between nodes.

    Raises:
        ValueError: one of them is out of range, or the run does not know it.
    """
    if nodes is not None and nodes < 2:
        raise ValueError(f"nodes must be 2 or more, got {nodes}; one node has no link between them")
    if nodes is not None and run.nodes == 1 and link_gbps is None:
        raise ValueError(
            "The run was on one node; give the rate of a link between nodes with --link-gbps"
        )
    if inside_gbps is not None and run.form in (FSDP, ALL_RANKS):
        raise ValueError(
            "inside_gbps is of an exchange of DDP, and what FSDP does inside a node is taken as it "
            "was in the run; leave it out"
        )
    for name, gbps in (("link_gbps", link_gbps), ("inside_gbps", inside_gbps)):
        if gbps is not None and not 0 < gbps < inf:
            raise ValueError(f"{name} must be above 0 Gbit/s, got {gbps:g}")
    if latency_us is not None and not 0 <= latency_us < inf:
        raise ValueError(f"latency_us must be 0 or more, got {latency_us:g}")
    link = run.link if link_gbps is None else replace(run.link, rate=rate_of(link_gbps))
    if latency_us is not None:
        link = replace(link, latency=latency_us / 1e6)
    elif run.nodes == 1 and nodes is not None:
        link = replace(link, latency=None)  # inside a node it is another
    inside = run.inside if inside_gbps is None else LinkSpeed(rate_of(inside_gbps))
    counts = run.counts if nodes is None else (max(run.counts),) * nodes
    return replace(run, counts=counts, link=link, inside=inside)


def scenarios_of(
    run: Scenario,
    there: Scenario,
    *,
    codecs: Sequence[str] = (),
    forms: Sequence[str] = (),
    parameters: Sequence[str] = (),
) -> list[Scenario]:
    """Every codec and form on the links and nodes of ``there``, and that itself.

    Args:
        codecs: only these, and :data:`DDP` only flat.
        forms: only these; otherwise flat and, where nodes have several ranks, by nodes. A sharded
            model has but one.
        parameters: only these codecs of the parameters, of a model sharded over all ranks.

    Raises:
        ValueError: none of them can be predicted.
    """
    sharded = {run.form, *forms} & {FSDP, ALL_RANKS}
    if wrong := [form for form in forms if sharded and form != run.form]:
        kind = run.form if run.form in sharded else wrong[0]
        raise ValueError(
            f"form must be {kind!r} for a profile of FSDP2, and not for one of DDP, got "
            f"{wrong[0]!r}; leave --form out"
        )
    if run.form == ALL_RANKS:
        return _of_shards(run, there, codecs=codecs, parameters=parameters)
    if parameters:
        raise ValueError(
            "Parameters travel where a model is sharded over all ranks, and that of this run is "
            f"not, got the codec {parameters[0]!r} for them; leave --parameters out"
        )
    of_run = (FSDP,) if run.form == FSDP else FORMS if max(there.counts) > 1 else (FLAT,)
    scenarios = [
        replace(there, codec=codec, form=form)
        for form in forms or of_run
        for codec in codecs or (DDP, *CANDIDATES)
        if codec != DDP or form == FLAT
    ]
    reasons = dict.fromkeys(scenario.unsupported for scenario in scenarios)
    if "" not in reasons:  # none, too: ddp in another form
        no_ddp = "DDP does not shard" if run.form == FSDP else "DDP itself is not hierarchical"
        because = "; ".join(reasons) or no_ddp
        raise ValueError(f"Nothing of this can be predicted: {because}")
    # Elsewhere it is what the others are compared with.
    return scenarios if there in (run, *scenarios) else [there, *scenarios]


def _of_shards(
    run: Scenario, there: Scenario, *, codecs: Sequence[str], parameters: Sequence[str]
) -> list[Scenario]:
    """Codecs of gradients and of parameters for a model that is sharded over all ranks."""
    of_gradients = codecs or (DDP, *SHARD_CANDIDATES["gradients"], run.codec)
    of_parameters = parameters or (*SHARD_CANDIDATES["parameters"], run.parameters)
    pairs = dict.fromkeys(
        (codec, "" if codec == DDP else gathered)
        for codec in of_gradients
        for gathered in of_parameters
    )
    scenarios = [replace(there, codec=codec, parameters=gathered) for codec, gathered in pairs]
    return scenarios if there in scenarios else [there, *scenarios]


SCHEMA = 3
LABEL = "Predicted step time (simulated)"


@dataclass(frozen=True)
class Prediction:
    """Predicted step of one scenario, in milliseconds; None with a ``reason`` where unknown.

    Args:
        gbps: of the link between nodes, headers included.
        exposed_ms: from the last gradient to the mean of all; in all collectives of a model that is
            sharded over all ranks.
        sent_mb: over the link of a node.
        change: of the step against the run's own codec and form with the same link and nodes, as
            predicted; -0.5: half as long.
        position: 1 for the fastest; settings closer than the tolerance share one. None: not ranked.
        source: of the codec's cost.
        assumption: condition of the prediction, which is not ranked then; empty: none.
        sync_every: local steps between two exchanges; times and bytes are means of a step. 0:
            gradients are exchanged in every step.
        fragments, overlap_steps: of local steps, as of ``Scenario``.
        parameters: codec of the parameters, as of ``Scenario``.
    """

    codec: str
    form: str
    nodes: int
    world_size: int
    gbps: float
    step_ms: float | None = None
    exposed_ms: float | None = None
    sent_mb: float | None = None
    change: float | None = None
    position: int | None = None
    source: str = ""
    assumption: str = ""
    reason: str = ""
    sync_every: int = 0
    fragments: int = 1
    overlap_steps: int = 0
    parameters: str = ""

    @property
    def exposed_share(self) -> float | None:
        """Share of a step's time in which it waits for the exchange."""
        if self.step_ms is None or self.exposed_ms is None:
            return None
        return self.exposed_ms / self.step_ms


@dataclass(frozen=True)
class Predictions:
    """Predictions for a run and for other settings on the same links and nodes.

    Args:
        measured_ms: median step of the run.
        baseline: prediction for the run itself; ``error``: of it, -0.1: a tenth shorter than
            measured.
        tolerance: share of a step; settings that differ by less are not ranked.
        scenarios: the fastest first; those without a prediction last.
        link: measured speed of the links.
        unavailable: figures that are not known, and why.
    """

    measured_ms: float
    baseline: Prediction
    error: float
    tolerance: float
    scenarios: Sequence[Prediction]
    link: Mapping[str, float | None]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    label: str = LABEL

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"schema": SCHEMA, **asdict(self)}

    def is_faster(self, prediction: Prediction) -> bool:
        """Faster than the run's own setting by more than the tolerance."""
        return prediction.change is not None and prediction.change < -self.tolerance


def headline(predictions: Predictions) -> str:
    """Sentence about the best setting."""
    best = next(iter(predictions.scenarios), None)
    if best is not None and best.change and best.position and predictions.is_faster(best):
        return f"Predicted with {name_of(best, predictions.baseline)}: {times_faster(best.change)}."
    faster = filter(predictions.is_faster, predictions.scenarios)
    only = dict.fromkeys(scenario.codec for scenario in faster)
    unless = f"; {', '.join(only)} may be, under its assumption" if only else ""
    return (
        f"No other setting is predicted to be faster by more than the error of the model{unless}."
    )


def times_faster(change: float) -> str:
    """Factor of two digits, such as ``1.9x``."""
    factor = 1 / (1 + change)
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.2g}x"


def name_of(setting: Prediction, baseline: Prediction) -> str:
    """Codec, and the form where it is not a flat one as in the run."""
    flat = "" if baseline.form == FLAT else ", flat"
    steps = f" every {count(setting.sync_every, 'step')}" if setting.sync_every else ""
    steps += f" in {setting.fragments} fragments" if setting.fragments > 1 else ""
    steps += (
        f" with {count(setting.overlap_steps, 'step')} overlap" if setting.overlap_steps else ""
    )
    if setting.form == ALL_RANKS:
        pair = f"{setting.codec} gradients, {setting.parameters} parameters"
        return "fsdp" if setting.codec == DDP else pair
    if setting.form == FSDP:
        return setting.codec
    words = setting.codec + steps + (flat if setting.form == FLAT else " between nodes")
    return f"{words}, leader form" if setting.form == LEADER else words


def where(setting: Prediction, *, link_given: bool = False) -> str:
    """Nodes of a scenario, and the rate of their links.

    Args:
        link_given: the rate is not that of the run. On one node each rank then has such a link.
    """
    rate, nodes = format_value(setting.gbps, "Gbit/s"), count(setting.nodes, "node")
    inside = f"each with a link of {rate}" if link_given else f"{rate} per rank inside the node"
    network = f"{rate} between them" if setting.nodes > 1 else inside
    return f"{count(setting.world_size, 'rank')} on {nodes}, {network}"


def remark(prediction: Prediction, predictions: Predictions) -> str:
    """Remark on a prediction, beside its figures."""
    if prediction.sync_every and prediction.exposed_share is not None:
        share = format_value(prediction.exposed_share, "%")
        return f"not ranked: for {prediction.assumption}; waits {share} of the time"
    if prediction.assumption:
        return f"not ranked: for {prediction.assumption}"
    is_same = prediction.change is not None and abs(prediction.change) <= predictions.tolerance
    return "no difference from this run within the error" if is_same else ""


def notes(predictions: Predictions) -> list[str]:
    """Error of the simulation, sources of costs, and what is unavailable."""
    baseline = predictions.baseline
    names: dict[str, dict[str, None]] = {}
    for prediction in (baseline, *predictions.scenarios):
        names.setdefault(prediction.source, {})[prediction.codec] = None
    missing: dict[str, list[Prediction]] = {}
    for scenario in predictions.scenarios:
        if scenario.reason:
            missing.setdefault(scenario.reason, []).append(scenario)
    costs = [f"{', '.join(codecs)} {source}" for source, codecs in names.items() if source]
    error = format_value(predictions.error, "%", signed=True)
    least = f"differences within {format_value(predictions.tolerance, '%')} are not ranked"
    return [
        f"this run simulated: {format_value(baseline.step_ms, 'ms')} ({error}); {least}",
        f"change: against {_setting(baseline)} with the same link and nodes",
        *([f"codec costs: {'; '.join(costs)}"] if costs else []),
        *(f"{name}: n/a, {reason}" for name, reason in predictions.unavailable.items()),
        *(f"n/a for {_codecs_and_forms(without)}: {reason}" for reason, without in missing.items()),
    ]


def _setting(setting: Prediction) -> str:
    return (
        name_of(setting, setting)
        if setting.form == ALL_RANKS
        else f"{setting.codec} {setting.form}"
    )


def _codecs_and_forms(predictions: Sequence[Prediction]) -> str:
    codecs = ", ".join(dict.fromkeys(prediction.codec for prediction in predictions))
    return f"{codecs} {', '.join(dict.fromkeys(prediction.form for prediction in predictions))}"
