"""Predicted step times of a run and of other settings, and what a report says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_dist.profiling.analysis.metrics import count, format_value
from lightning_dist.profiling.whatif.scenarios import ALL_RANKS, DDP, FLAT, FSDP, LEADER

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

    def is_faster(self, each: Prediction) -> bool:
        """Faster than the run's own setting by more than the tolerance."""
        return each.change is not None and each.change < -self.tolerance


def headline(found: Predictions) -> str:
    """Sentence about the best setting."""
    best = next(iter(found.scenarios), None)
    if best is not None and best.change is not None and best.position and found.is_faster(best):
        return f"Predicted with {name_of(best, found.baseline)}: {times_faster(best.change)}."
    only = dict.fromkeys(each.codec for each in found.scenarios if found.is_faster(each))
    unless = f"; {', '.join(only)} may be, under its assumption" if only else ""
    return (
        f"No other setting is predicted to be faster by more than the error of the model{unless}."
    )


def times_faster(change: float) -> str:
    """Factor of two digits, such as ``1.9x``."""
    factor = 1 / (1 + change)
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.2g}x"


def name_of(each: Prediction, baseline: Prediction) -> str:
    """Codec, and the form where it is not a flat one as in the run."""
    flat = "" if baseline.form == FLAT else ", flat"
    steps = f" every {count(each.sync_every, 'step')}" if each.sync_every else ""
    steps += f" in {each.fragments} fragments" if each.fragments > 1 else ""
    steps += f" with {count(each.overlap_steps, 'step')} overlap" if each.overlap_steps else ""
    if each.form == ALL_RANKS:
        pair = f"{each.codec} gradients, {each.parameters} parameters"
        return "fsdp" if each.codec == DDP else pair
    if each.form == FSDP:
        return each.codec
    words = each.codec + steps + (flat if each.form == FLAT else " between nodes")
    return f"{words}, leader form" if each.form == LEADER else words


def where(each: Prediction, *, link_given: bool = False) -> str:
    """Nodes of a scenario, and the rate of their links.

    Args:
        link_given: the rate is not that of the run. On one node each rank then has such a link.
    """
    rate, nodes = format_value(each.gbps, "Gbit/s"), count(each.nodes, "node")
    inside = f"each with a link of {rate}" if link_given else f"{rate} per rank inside the node"
    network = f"{rate} between them" if each.nodes > 1 else inside
    return f"{count(each.world_size, 'rank')} on {nodes}, {network}"


def remark(each: Prediction, found: Predictions) -> str:
    """Remark on a prediction, beside its figures."""
    if each.sync_every and each.exposed_share is not None:
        share = format_value(each.exposed_share, "%")
        return f"not ranked: for {each.assumption}; waits {share} of the time"
    if each.assumption:
        return f"not ranked: for {each.assumption}"
    is_same = each.change is not None and abs(each.change) <= found.tolerance
    return "no difference from this run within the error" if is_same else ""


def notes(found: Predictions) -> list[str]:
    """Error of the simulation, sources of costs, and what is unavailable."""
    baseline = found.baseline
    names: dict[str, dict[str, None]] = {}
    for each in (baseline, *found.scenarios):
        names.setdefault(each.source, {})[each.codec] = None
    missing: dict[str, list[Prediction]] = {}
    for each in found.scenarios:
        if each.reason:
            missing.setdefault(each.reason, []).append(each)
    costs = [f"{', '.join(codecs)} {source}" for source, codecs in names.items() if source]
    error = format_value(found.error, "%", signed=True)
    least = f"differences within {format_value(found.tolerance, '%')} are not ranked"
    return [
        f"this run simulated: {format_value(baseline.step_ms, 'ms')} ({error}); {least}",
        f"change: against {_setting(baseline)} with the same link and nodes",
        *([f"codec costs: {'; '.join(costs)}"] if costs else []),
        *(f"{name}: n/a, {reason}" for name, reason in found.unavailable.items()),
        *(f"n/a for {_codecs_and_forms(of)}: {reason}" for reason, of in missing.items()),
    ]


def _setting(each: Prediction) -> str:
    return name_of(each, each) if each.form == ALL_RANKS else f"{each.codec} {each.form}"


def _codecs_and_forms(of: Sequence[Prediction]) -> str:
    codecs = ", ".join(dict.fromkeys(each.codec for each in of))
    return f"{codecs} {', '.join(dict.fromkeys(each.form for each in of))}"
