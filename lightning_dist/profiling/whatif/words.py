"""Predictions in a summary: its sentences, and names of settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_dist.profiling.analysis.metrics import count, format_value
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.costs import Costs
from lightning_dist.profiling.whatif.observe import Observed, observe
from lightning_dist.profiling.whatif.predict import predict
from lightning_dist.profiling.whatif.predictions import Prediction, Predictions
from lightning_dist.profiling.whatif.scenarios import (
    ALL_RANKS,
    DDP,
    FLAT,
    FSDP,
    LEADER,
    scenarios_of,
)

if TYPE_CHECKING:
    from lightning_dist.profiling.analysis.parts import Summary

MEASURES = "`lightning-dist profile whatif DIR` measures"
"""Remedy where costs are missing."""


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
    """Hosts of a scenario, and the rate of their links.

    Args:
        link_given: the rate is not that of the run. On one host each rank then has such a link.
    """
    rate, hosts = format_value(each.gbps, "Gbit/s"), count(each.hosts, "node")
    inside = f"each with a link of {rate}" if link_given else f"{rate} per rank inside the node"
    network = f"{rate} between them" if each.hosts > 1 else inside
    return f"{count(each.world_size, 'rank')} on {hosts}, {network}"


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


def with_whatif(summary: Summary, run: Run, costs: Callable[[Observed], Costs]) -> Summary:
    """``summary`` of ``run`` with predictions, or with the reason why there are none.

    Args:
        costs: of codecs; called only where something can be predicted with them.
    """
    try:
        observed = observe(run)
        known = costs(observed)
        if not known.by_name:
            raise ValueError(f"{known.reason}; {MEASURES}")
        own = observed.scenario
        scenarios = [each for each in scenarios_of(own, own) if each != own]
        found = predict(observed, scenarios, costs=known.by_name)
    except Exception as error:  # the rest of the report is worth more than this part of it
        reason = f"the prediction failed: {type(error).__name__}: {error}"
        reason = str(error) if isinstance(error, ValueError) else reason
        return replace(summary, unavailable={**summary.unavailable, "predictions": reason})
    if known.reason:
        unavailable = {**found.unavailable, "costs": f"{known.reason}; {MEASURES}"}
        found = replace(found, unavailable=unavailable)
    words = " ".join(filter(None, (summary.headline, headline(found))))
    return replace(summary, predictions=found, headline=words)
