"""Predicted step times of other scenarios, beside the run itself, with the error of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from lightning_dist.measurement.costs import CANDIDATES, CodecCost
from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.costs import Costs
from lightning_dist.profiling.whatif.observe import Observed, observe
from lightning_dist.profiling.whatif.predictions import Prediction, Predictions, headline
from lightning_dist.profiling.whatif.simulator import (
    DDP,
    FLAT,
    FORMS,
    FREE,
    Link,
    Scenario,
    decoding,
    rate_of,
    rebucket,
    simulate_step,
)

LEAST_TOLERANCE = 0.02
"""Two runs of the same scenario differ by as much, however exact the model is for one of them."""

BUCKET_SIZES = (5.0, 25.0, 100.0)
"""MB to ask about; 25 is DDP's own."""


def elsewhere(
    run: Scenario,
    *,
    hosts: int | None = None,
    link_gbps: float | None = None,
    inside_gbps: float | None = None,
    latency_us: float | None = None,
) -> Scenario:
    """Scenario of a run on other links and hosts; None: as in the run.

    Args:
        hosts: number, each with as many ranks as the largest host of the run.
        link_gbps: of a host's link, headers included.
        inside_gbps: of a rank inside its host, headers included.
        latency_us: microseconds of a round between hosts.

    Raises:
        ValueError: one of them is out of range, or the run does not know it.
    """
    if hosts is not None and hosts < 2:
        raise ValueError(f"hosts must be 2 or more, got {hosts}; one host has no link between them")
    if hosts is not None and run.hosts == 1 and link_gbps is None:
        raise ValueError(
            "the run was on one host; give the rate of a link between hosts with --link-gbps"
        )
    for name, gbps in (("link_gbps", link_gbps), ("inside_gbps", inside_gbps)):
        if gbps is not None and not 0 < gbps < inf:
            raise ValueError(f"{name} must be above 0 Gbit/s, got {gbps:g}")
    if latency_us is not None and not 0 <= latency_us < inf:
        raise ValueError(f"latency_us must be 0 or more, got {latency_us:g}")
    link = run.link if link_gbps is None else replace(run.link, rate=rate_of(link_gbps))
    if latency_us is not None:
        link = replace(link, latency=latency_us / 1e6)
    elif run.hosts == 1 and hosts is not None:
        link = replace(link, latency=None)  # inside a host it is another
    inside = run.inside if inside_gbps is None else Link(rate_of(inside_gbps))
    counts = run.counts if hosts is None else (max(run.counts),) * hosts
    return replace(run, counts=counts, link=link, inside=inside)


def scenarios_of(
    observed: Observed,
    there: Scenario,
    *,
    codecs: Sequence[str] = (),
    forms: Sequence[str] = (),
    bucket_mb: Sequence[float] = (),
) -> list[Scenario]:
    """Every codec and form on the links and hosts of ``there``, and that itself.

    Args:
        codecs: only these, and :data:`DDP` only flat.
        forms: only these; otherwise flat and, where hosts have several ranks, by hosts.
        bucket_mb: only these sizes. If nothing at all is chosen, the run's own setting is also in
            buckets of :data:`BUCKET_SIZES`, but for those that change nothing.

    Raises:
        ValueError: none of them can be predicted.
    """
    found = [
        replace(there, codec=codec, form=form, bucket_mb=size)
        for size in bucket_mb or (None,)
        for form in forms or (FORMS if max(there.counts) > 1 else (FLAT,))
        for codec in codecs or (DDP, *CANDIDATES)
        if codec != DDP or form == FLAT
    ]
    if not (codecs or forms or bucket_mb):
        seen = [list(observed.buckets)]
        for size in BUCKET_SIZES:
            buckets = rebucket(observed.buckets, size, begin=observed.begin)
            if buckets not in seen:
                seen.append(buckets)
                found.append(replace(there, bucket_mb=size))
    reasons = dict.fromkeys(each.unsupported for each in found)
    if "" not in reasons:  # none, too: ddp in another form
        because = "; ".join(reasons) or "DDP itself knows no hosts"
        raise ValueError(f"nothing of this can be predicted: {because}")
    # Elsewhere it is what the others are compared with.
    return found if there in (observed.scenario, *found) else [there, *found]


def predict(
    observed: Observed, scenarios: Sequence[Scenario], *, costs: Mapping[str, CodecCost]
) -> Predictions:
    """Simulate the run itself, and then ``scenarios``, which share links and hosts.

    Raises:
        ValueError: the run itself cannot be simulated, so that the error is unknown.
    """
    run, unavailable = observed.scenario, dict(observed.unavailable)
    own = replace(next(iter(scenarios), run), codec=run.codec, form=run.form, bucket_mb=None)
    assert all((each.link, each.counts) == (own.link, own.counts) for each in scenarios)
    known = {DDP: FREE, **costs, **_cost_in_run(observed, costs)}
    baseline, own_there = (_prediction(observed, each, known) for each in (run, own))
    if baseline.step_ms is None or own_there.step_ms is None:
        reason = baseline.reason or own_there.reason
        raise ValueError(f"this run cannot be simulated: {reason}")
    error = baseline.step_ms / (observed.step * 1e3) - 1
    tolerance = max(abs(error), LEAST_TOLERANCE)
    found = [_prediction(observed, scenario, known) for scenario in scenarios]
    found = _ranked(found, own_there.step_ms, tolerance)
    if run.hosts == 1 and own.hosts > 1 and own.link.latency is None:
        unavailable["latency"] = (
            "the run was on one host; rounds between hosts count nothing without --latency-us"
        )
    link = {
        "gbps": run.link.gbps,
        "inside_gbps": None if run.inside is None else run.inside.gbps,
        "latency_us": None if run.link.latency is None else run.link.latency * 1e6,
    }
    return Predictions(observed.step * 1e3, baseline, error, tolerance, found, link, unavailable)


def with_whatif(summary: Summary, run: Run, costs: Callable[[Observed], Costs]) -> Summary:
    """``summary`` of ``run`` with predictions, or with the reason why there are none.

    Args:
        costs: of codecs; called only where something can be predicted with them.
    """
    try:
        observed = observe(run)
        known = costs(observed)
        if not known.by_name:
            raise ValueError(known.reason)
        own = observed.scenario
        scenarios = [each for each in scenarios_of(observed, own) if each != own]
        found = predict(observed, scenarios, costs=known.by_name)
    except Exception as error:  # the rest of the report is worth more than this part of it
        reason = f"the prediction failed: {type(error).__name__}: {error}"
        reason = str(error) if isinstance(error, ValueError) else reason
        return replace(summary, unavailable={**summary.unavailable, "predictions": reason})
    if known.reason:
        found = replace(found, unavailable={**found.unavailable, "costs": known.reason})
    words = " ".join(filter(None, (summary.headline, headline(found))))
    return replace(summary, predictions=found, headline=words)


def _cost_in_run(observed: Observed, costs: Mapping[str, CodecCost]) -> dict[str, CodecCost]:
    """Cost of the run's own codec, with the bytes and times of the run."""
    run = observed.scenario
    cost = costs.get(run.codec)
    if cost is None or run.unsupported:
        return {}
    step = simulate_step(observed.buckets, run, cost=cost, inside_cost=costs.get("none"))
    cost = replace(cost, wire=cost.wire * observed.sent / step.sent, assumption="")
    if run.form != FLAT or observed.encode is None or observed.decode is None:
        return {cost.name: cost}  # what it does inside a host is in its times
    expected = sum(decoding(cost, run.world_size))
    slower = observed.decode / observed.elements / expected if expected else 1.0
    encode, decode, store = (
        observed.encode / observed.elements,
        cost.decode,
        cost.store,
    )
    cost = replace(cost, encode=encode, decode=decode * slower, store=store * slower)
    return {cost.name: replace(cost, source="this run")}


def _prediction(
    observed: Observed, scenario: Scenario, costs: Mapping[str, CodecCost]
) -> Prediction:
    needed = [scenario.codec] + ["none"] * (scenario.form != FLAT)
    missing = [name for name in needed if name not in costs]
    reason = f"what {missing[0]} costs was not measured" if missing else scenario.unsupported
    codec, shape = scenario.codec, (scenario.hosts, scenario.world_size, scenario.link.gbps)
    found = Prediction(codec, scenario.form, *shape, reason=reason, bucket_mb=scenario.bucket_mb)
    if reason:
        return found
    # What the run's own codec took has its share of the core in it.
    one_core = observed.one_core and codec != observed.scenario.codec
    buckets, cost, inside = observed.buckets, costs[codec], costs.get("none")
    if scenario.bucket_mb is not None:
        buckets = rebucket(buckets, scenario.bucket_mb, begin=observed.begin)
    step = simulate_step(buckets, scenario, cost=cost, inside_cost=inside, one_core=one_core)
    last = max(bucket.ready for bucket in buckets)
    done = max(step.done, last)
    return replace(
        found,
        step_ms=(done + observed.tail) * 1e3,
        exposed_ms=(done - last) * 1e3,
        sent_mb=step.sent / 1e6,
        source=cost.source,
        assumption=cost.assumption,
    )


def _ranked(found: Iterable[Prediction], own_ms: float, tolerance: float) -> list[Prediction]:
    """Predictions with positions: one within the tolerance of the one before it shares its own.

    Those of a position that cannot be told from its fastest are listed by what they send, because
    more bytes lose less, and first those that are faster than the run's own by more than the
    tolerance. A prediction with an assumption has no position, and comes after all that have.
    """
    position, fastest, before, number = 0, 0.0, -inf, 0
    ordered: list[tuple[tuple[float, ...], Prediction]] = []
    for each in sorted(found, key=lambda each: each.step_ms or inf):
        step, sent = each.step_ms, each.sent_mb
        if step is None or sent is None:
            ordered.append(((inf, 1.0), each))
            continue
        change = step / own_ms - 1
        if each.assumption:
            ordered.append(((inf, 0.0), replace(each, change=change)))
            continue
        number += 1
        if step > before * (1 + tolerance):
            position, fastest = number, step
        before = step
        order: tuple[float, ...] = position, 2.0, step
        if step <= fastest * (1 + tolerance):
            order = position, float(change >= -tolerance), -round(sent, 6)  # to a byte
        ordered.append((order, replace(each, change=change, position=position)))
    return [each for _, each in sorted(ordered, key=lambda pair: pair[0])]
