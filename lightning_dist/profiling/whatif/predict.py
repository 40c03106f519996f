"""Predicted step times of other scenarios, beside the run itself, with the error of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.folder import Run
from lightning_dist.profiling.whatif.answer import (
    NO_DIFFERENCE,
    NO_ERROR,
    THIS_RUN,
    Prediction,
    WhatIf,
    is_faster,
)
from lightning_dist.profiling.whatif.costs import Costs
from lightning_dist.profiling.whatif.observe import Observed, observe
from lightning_dist.profiling.whatif.simulator import (
    DDP,
    FLAT,
    FORMS,
    Link,
    Scenario,
    rebucket,
    simulate_step,
)
from lightning_dist.profiling.whatif.told import predicted
from lightning_dist.reducer.costs import CANDIDATES, CodecCost

LEAST_MARGIN = 0.02
"""Two runs of the same scenario differ by as much, however exact the model is for one of them."""

BUCKET_SIZES = (5.0, 25.0, 100.0)
"""MB to ask about; 25 is DDP's own."""

MS = 1e3
"""Milliseconds in a second."""


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
        ValueError: one of them is out of range.
    """
    if hosts is not None and hosts < 2:
        raise ValueError(f"hosts must be 2 or more, got {hosts}; one host has no link between them")
    for name, gbps in (("link_gbps", link_gbps), ("inside_gbps", inside_gbps)):
        if gbps is not None and not 0 < gbps < inf:
            raise ValueError(f"{name} must be above 0 Gbit/s, got {gbps:g}")
    if latency_us is not None and not 0 <= latency_us < inf:
        raise ValueError(f"latency_us must be 0 or more, got {latency_us:g}")
    link = run.link
    if link_gbps is not None:
        link = replace(link, rate=Link.of_gbps(link_gbps).rate)
    if latency_us is not None:
        link = replace(link, latency=latency_us / 1e6)
    elif run.hosts == 1 and hosts is not None:
        link = replace(link, latency=None)  # inside a host it is another
    return replace(
        run,
        counts=run.counts if hosts is None else (max(run.counts),) * hosts,
        link=link,
        inside=run.inside if inside_gbps is None else Link.of_gbps(inside_gbps),
    )


def candidates(
    base: Scenario, codecs: Iterable[str], *, forms: Sequence[str] = ()
) -> list[Scenario]:
    """Every codec of ``base``, flat and, where hosts have several ranks, by hosts.

    Args:
        codecs: with :data:`DDP` stock DDP too, which is flat.
        forms: only these.
    """
    forms = forms or (FORMS if max(base.counts) > 1 else (FLAT,))
    return [
        replace(base, codec=codec, form=form, bucket_mb=None)
        for form in forms
        for codec in codecs
        if codec != DDP or form == FLAT
    ]


def other_buckets(
    observed: Observed, base: Scenario, sizes: Sequence[float] = BUCKET_SIZES
) -> list[Scenario]:
    """``base`` in other buckets; sizes that change nothing are left out."""
    seen, found = [list(observed.buckets)], []
    for size in sizes:
        buckets = rebucket(observed.buckets, size, begin=observed.begin)
        if buckets not in seen:
            seen.append(buckets)
            found.append(replace(base, bucket_mb=size))
    return found


def predict(
    observed: Observed, scenarios: Sequence[Scenario], *, costs: Mapping[str, CodecCost]
) -> WhatIf:
    """Simulate the run itself, and then ``scenarios``."""
    run = observed.scenario
    known = {**costs, **_cost_in_run(observed, costs)}
    current, error = _prediction(observed, run, known), None
    if current.step_ms is not None:
        error = current.step_ms / (observed.step * MS) - 1
    margin = None if error is None else max(abs(error), LEAST_MARGIN)
    of_place: dict[Scenario, list[Scenario]] = {}  # by the run's own codec, form and buckets there
    for scenario in scenarios:
        own = replace(scenario, codec=run.codec, form=run.form, bucket_mb=None)
        of_place.setdefault(own, []).append(scenario)
    others: list[Prediction] = []
    for own, alike in of_place.items():
        there = [_prediction(observed, scenario, known) for scenario in alike]
        others += _ranked(there, _prediction(observed, own, known), margin)
    reasons, against = dict(observed.reasons), THIS_RUN
    if run.hosts == 1 and any(own.hosts > 1 and own.link.latency is None for own in of_place):
        reasons["latency"] = (
            "the run was on one host; rounds between hosts count nothing without --latency-us"
        )
    if any(own != run for own in of_place):
        against = f"{run.codec} {run.form}, as in this run, with the same link and hosts"
    latency = run.link.latency
    return WhatIf(
        measured_ms=observed.step * MS,
        current=current,
        error=error,
        margin=margin,
        others=sorted(others, key=lambda each: each.step_ms is None),
        link={
            "gbps": run.link.gbps,
            "inside_gbps": None if run.inside is None else run.inside.gbps,
            "latency_us": None if latency is None else latency * 1e6,
        },
        reasons=reasons,
        against=against,
    )


def with_whatif(summary: Summary, run: Run, costs: Callable[[Observed], Costs]) -> Summary:
    """``summary`` of ``run`` with predictions, or with the reason why there are none.

    Args:
        costs: of codecs; called only where something can be predicted with them.
    """
    try:
        found = ask(run, costs)
    except ValueError as error:
        reason = str(error)
    except Exception as error:  # the rest of the report is worth more than this part of it
        reason = f"the prediction failed: {type(error).__name__}: {error}"
    else:
        headline = " ".join(filter(None, (summary.headline, predicted(found))))
        return replace(summary, whatif=found, headline=headline)
    return replace(summary, reasons={**summary.reasons, "whatif": reason})


def ask(run: Run, costs: Callable[[Observed], Costs]) -> WhatIf:
    """Predictions for all candidates on the links and hosts of the run.

    Raises:
        ValueError: nothing can be predicted, and why.
    """
    observed = observe(run)
    known = costs(observed)
    if not known.by_name:
        raise ValueError(known.reason)
    own = observed.scenario
    scenarios = [each for each in candidates(own, (DDP, *CANDIDATES)) if each != own]
    scenarios += other_buckets(observed, own)
    found = predict(observed, scenarios, costs=known.by_name)
    reasons = {"costs": known.reason} if known.reason else {}
    return replace(found, reasons={**found.reasons, **reasons})


def why_not(observed: Observed, scenario: Scenario) -> str:
    """Reason why a scenario cannot be predicted, whatever codecs cost; empty if it can."""
    run = observed.scenario
    if run.hosts == 1 and scenario.hosts > 1 and scenario.link.rate == run.link.rate:
        return "the run was on one host; give the rate of a link between hosts with --link-gbps"
    return scenario.unsupported


def _cost_in_run(observed: Observed, costs: Mapping[str, CodecCost]) -> dict[str, CodecCost]:
    """Cost of the run's own codec, with the bytes and times of the run."""
    run = observed.scenario
    cost = costs.get(run.codec)
    if cost is None or run.unsupported:
        return {}
    step = simulate_step(observed.buckets, run, cost=cost, inside_cost=costs.get("none"))
    cost = replace(cost, wire=cost.wire * observed.sent / step.sent, assumes="")
    if run.form != FLAT or observed.encode is None or observed.decode is None:
        return {cost.name: cost}  # what it does inside a host is in its times
    payloads, reduced = 1, 0.0
    if cost.exchange == "two_shot" and run.world_size > 2:
        reduced = cost.decode + cost.encode / run.world_size
    elif cost.exchange != "allreduce":
        payloads = run.world_size
    expected = cost.decoding(payloads) + reduced
    slower = observed.decode / observed.elements / expected if expected else 1.0
    encode = observed.encode / observed.elements
    decode, settle = cost.decode * slower, cost.settle * slower
    return {cost.name: replace(cost, encode=encode, decode=decode, settle=settle, source=THIS_RUN)}


def _prediction(
    observed: Observed, scenario: Scenario, costs: Mapping[str, CodecCost]
) -> Prediction:
    codec, form = scenario.codec, scenario.form
    about = Prediction(
        codec,
        form,
        scenario.hosts,
        scenario.world_size,
        scenario.link.gbps,
        bucket_mb=scenario.bucket_mb,
    )
    cost = costs.get(codec)
    if codec != DDP and cost is None:
        return replace(about, reason=f"what {codec} costs was not measured")
    if form != FLAT and "none" not in costs:
        return replace(about, reason="what a copy costs was not measured")
    if reason := why_not(observed, scenario):
        return replace(about, reason=reason)
    buckets = observed.buckets
    if scenario.bucket_mb is not None:
        buckets = rebucket(buckets, scenario.bucket_mb, begin=observed.begin)
    step = simulate_step(
        buckets,
        scenario,
        cost=cost,
        inside_cost=costs.get("none"),
        # What the run's own codec took has its share of the core in it.
        one_core=observed.one_core and codec != observed.scenario.codec,
    )
    last = max(bucket.ready for bucket in buckets)
    done = max(step.done, last)
    return replace(
        about,
        step_ms=(done + observed.tail) * MS,
        exposed_ms=(done - last) * MS,
        sent_mb=step.sent / 1e6,
        source="" if cost is None else cost.source,
        assumes="" if cost is None else cost.assumes,
    )


def _ranked(found: Sequence[Prediction], own: Prediction, margin: float | None) -> list[Prediction]:
    """The best first. One that is within the margin of the one before it shares its place.

    Those that cannot be told from the fastest of a place are listed by what they send, because more
    bytes lose less, and first those that are faster than ``own`` by more than the margin. A
    prediction that is only true of some models has no place, and comes after all that have.
    """
    told = sorted((each for each in found if each.step_ms is not None), key=_step)
    if margin is None or own.step_ms is None:
        return [replace(each, verdict=NO_ERROR) for each in told] + _without_step(found)
    changes = [_step(each) / own.step_ms - 1 for each in told]
    told = [
        replace(each, change=change, verdict=NO_DIFFERENCE if abs(change) <= margin else "")
        for each, change in zip(told, changes, strict=True)
    ]
    placed: list[Prediction] = []
    tied: list[Prediction] = []
    for each in [each for each in told if not each.assumes]:
        if tied and _step(each) > _step(tied[-1]) * (1 + margin):
            placed += _tied(tied, margin, place=len(placed) + 1)
            tied = []
        tied.append(each)
    placed += _tied(tied, margin, place=len(placed) + 1)
    return [*placed, *(each for each in told if each.assumes), *_without_step(found)]


def _tied(tied: Sequence[Prediction], margin: float, *, place: int) -> list[Prediction]:
    def order(each: Prediction) -> tuple[bool, bool, float]:
        if _step(each) > _step(tied[0]) * (1 + margin):
            return True, True, _step(each)
        return False, not is_faster(each), -round(each.sent_mb or 0.0, 6)  # to a byte

    return [replace(each, place=place) for each in sorted(tied, key=order)]


def _without_step(found: Sequence[Prediction]) -> list[Prediction]:
    return [each for each in found if each.step_ms is None]


def _step(each: Prediction) -> float:
    assert each.step_ms is not None
    return each.step_ms
