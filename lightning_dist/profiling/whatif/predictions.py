"""Predictions for a run and for other settings, and their words wherever they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_dist.profiling.analysis.metrics import count, format_value
from lightning_dist.profiling.whatif.simulator import FLAT, LEADER

SCHEMA = 2
LABEL = "Predicted step time (simulated)"


@dataclass(frozen=True)
class Prediction:
    """Predicted step of one scenario, in milliseconds; None with a ``reason`` where unknown.

    Args:
        gbps: of the link between hosts, headers included.
        exposed_ms: from the last gradient to the mean of all.
        sent_mb: over the link of a host.
        change: of the step against the run's own codec, form and buckets with the same link and
            hosts, as predicted; -0.5: half as long.
        position: 1 for the fastest; settings closer than the tolerance share one. None: not ranked.
        source: of the codec's cost.
        assumption: condition of the prediction, which is not ranked then; empty: none.
        bucket_mb: ``bucket_cap_mb`` of DDP; None: the buckets of the run.
    """

    codec: str
    form: str
    hosts: int
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
    bucket_mb: float | None = None


@dataclass(frozen=True)
class Predictions:
    """Predictions for a run and for other settings on the same links and hosts.

    Args:
        measured_ms: median step of the run.
        baseline: prediction for the run itself.
        error: of ``baseline``, -0.1: a tenth shorter than measured.
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
    return f"No other setting is predicted to be faster than the model can tell{unless}."


def times_faster(change: float) -> str:
    """Factor of two digits, such as ``1.9x``."""
    factor = 1 / (1 + change)
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.2g}x"


def name_of(each: Prediction, baseline: Prediction) -> str:
    """Codec, and what else is not as in a flat exchange with the buckets of the run."""
    flat = "" if baseline.form == FLAT else ", flat"
    words = each.codec + (flat if each.form == FLAT else " between hosts")
    if each.form == LEADER:
        words += ", leader form"
    return words if each.bucket_mb is None else f"{words} in buckets of {each.bucket_mb:g} MB"


def where(each: Prediction) -> str:
    """Hosts of a scenario, and the rate of their links."""
    between = "between them" if each.hosts > 1 else "per rank, no network"
    ranks, hosts = count(each.world_size, "rank"), count(each.hosts, "host")
    return f"{ranks} on {hosts}, {format_value(each.gbps, 'Gbit/s')} {between}"


def remark(each: Prediction, found: Predictions) -> str:
    """Remark on a prediction, beside its figures."""
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
    missing: dict[tuple[str, str], dict[str, None]] = {}
    for each in found.scenarios:
        if each.reason:
            missing.setdefault((each.form, each.reason), {})[each.codec] = None
    error = format_value(found.error, "%", signed=True)
    least = f"differences within {format_value(found.tolerance, '%')} are not ranked"
    return [
        f"this run simulated: {baseline.step_ms:.1f} ms ({error}); {least}",
        f"change: against {baseline.codec} {baseline.form} with the same link and hosts",
        *(f"cost of {', '.join(codecs)}: {source}" for source, codecs in names.items() if source),
        *(f"{name}: n/a, {reason}" for name, reason in found.unavailable.items()),
        *(f"n/a for {', '.join(of)} {form}: {reason}" for (form, reason), of in missing.items()),
    ]
