"""Predicted step times of other scenarios beside the run itself, and their words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from lightning_dist.measurement.costs import CANDIDATES, CodecCost
from lightning_dist.profiling.analysis.metrics import count, format_value
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.costs import Costs
from lightning_dist.profiling.whatif.observe import Observed, observe
from lightning_dist.profiling.whatif.simulator import (
    DDP,
    FLAT,
    FORMS,
    FREE,
    FSDP,
    LEADER,
    SHARDED,
    Link,
    Scenario,
    decoding,
    rate_of,
    simulate_local_step,
    simulate_step,
)

if TYPE_CHECKING:
    from lightning_dist.profiling.analysis.parts import Summary

SCHEMA = 2
LABEL = "Predicted step time (simulated)"

LOCAL_STEPS = "local steps, with which a model trains differently"
"""Assumption of their predictions."""

LEAST_TOLERANCE = 0.02
"""Two runs of the same scenario differ by as much, however exact the model is for one of them."""


@dataclass(frozen=True)
class Prediction:
    """Predicted step of one scenario, in milliseconds; None with a ``reason`` where unknown.

    Args:
        gbps: of the link between hosts, headers included.
        exposed_ms: from the last gradient to the mean of all.
        sent_mb: over the link of a host.
        change: of the step against the run's own codec and form with the same link and hosts, as
            predicted; -0.5: half as long.
        position: 1 for the fastest; settings closer than the tolerance share one. None: not ranked.
        source: of the codec's cost.
        assumption: condition of the prediction, which is not ranked then; empty: none.
        sync_every: local steps between two exchanges; times and bytes are means of a step. 0:
            gradients are exchanged in every step.
        fragments, overlap_steps: of local steps, as of ``Scenario``.
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
    sync_every: int = 0
    fragments: int = 1
    overlap_steps: int = 0

    @property
    def exposed_share(self) -> float | None:
        """Share of a step's time in which it waits for the exchange."""
        if self.step_ms is None or self.exposed_ms is None:
            return None
        return self.exposed_ms / self.step_ms


@dataclass(frozen=True)
class Predictions:
    """Predictions for a run and for other settings on the same links and hosts.

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


def elsewhere(
    run: Scenario,
    *,
    hosts: int | None = None,
    link_gbps: float | None = None,
    inside_gbps: float | None = None,
    latency_us: float | None = None,
) -> Scenario:
    """Scenario of a run on other links and hosts; None: as in the run. Rates include headers.

    Args:
        hosts: number, each with as many ranks as the largest host of the run.
        link_gbps, inside_gbps: of a host's link, and of a rank inside its host.
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
    if inside_gbps is not None and run.form == FSDP:
        raise ValueError(
            "inside_gbps is of an exchange of DDP, and what FSDP does inside a host is taken as it "
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
    elif run.hosts == 1 and hosts is not None:
        link = replace(link, latency=None)  # inside a host it is another
    inside = run.inside if inside_gbps is None else Link(rate_of(inside_gbps))
    counts = run.counts if hosts is None else (max(run.counts),) * hosts
    return replace(run, counts=counts, link=link, inside=inside)


def scenarios_of(
    run: Scenario, there: Scenario, *, codecs: Sequence[str] = (), forms: Sequence[str] = ()
) -> list[Scenario]:
    """Every codec and form on the links and hosts of ``there``, and that itself.

    Args:
        codecs: only these, and :data:`DDP` only flat.
        forms: only these; otherwise flat and, where hosts have several ranks, by hosts. A sharded
            model has but one.

    Raises:
        ValueError: none of them can be predicted.
    """
    if wrong := [form for form in forms if (form == FSDP) != (run.form == FSDP)]:
        raise ValueError(
            f"the form of a sharded model is {FSDP}, and that of others is not, got {wrong[0]!r} "
            f"for a run that is {run.form}; leave --form out"
        )
    of_run = (FSDP,) if run.form == FSDP else FORMS if max(there.counts) > 1 else (FLAT,)
    found = [
        replace(there, codec=codec, form=form)
        for form in forms or of_run
        for codec in codecs or (DDP, *CANDIDATES)
        if codec != DDP or form == FLAT
    ]
    reasons = dict.fromkeys(each.unsupported for each in found)
    if "" not in reasons:  # none, too: ddp in another form
        no_ddp = "DDP does not shard" if run.form == FSDP else "DDP itself knows no hosts"
        because = "; ".join(reasons) or no_ddp
        raise ValueError(f"nothing of this can be predicted: {because}")
    # Elsewhere it is what the others are compared with.
    return found if there in (run, *found) else [there, *found]


def local_scenarios(
    observed: Observed,
    there: Scenario,
    *,
    costs: Mapping[str, CodecCost],
    codecs: Sequence[str] = (),
    form: str | None = None,
    sync_every: Sequence[int] = (),
    below: float | None = None,
    fragments: int = 1,
    overlap_steps: int = 0,
) -> list[Scenario]:
    """Local steps on the links and hosts of ``there``, for every codec whose cost is known.

    Args:
        form: of the exchange; None: by hosts where that can be.
        sync_every: local steps between two exchanges.
        below: for every codec also the least number of them with which waiting for the exchange
            takes no more than this share of the time.
        fragments: parts of the model that are exchanged in turn.
        overlap_steps: local steps that an exchange has before training waits for it.

    Raises:
        ValueError: one of them is out of range.
    """
    if there.form == FSDP and (sync_every or below is not None):
        raise ValueError(
            "local steps are of a model that every rank holds as a whole, and the model of this "
            "run is sharded; leave --local-steps and --below out"
        )
    if fragments < 1 or overlap_steps < 0:
        raise ValueError(
            f"fragments must be 1 or more and overlap_steps 0 or more, got {fragments} and "
            f"{overlap_steps}"
        )
    if any(each < 1 for each in sync_every):
        raise ValueError(f"local steps must be 1 or more, got {min(sync_every)}")
    if below is not None and not 0 < below < 1:
        raise ValueError(f"the share of waiting must be between 0 and 100 %, got {below:.0%}")
    forms = [replace(there, codec="none", form=each) for each in (SHARDED, LEADER, FLAT)]
    chosen = next(each for each in forms if not each.unsupported) if form is None else form
    form = chosen if isinstance(chosen, str) else chosen.form
    found = []
    for codec in codecs or CANDIDATES:
        if codec == DDP or codec not in costs:
            continue
        one = replace(
            there,
            codec=codec,
            form=form,
            sync_every=fragments * (overlap_steps + 1),
            fragments=fragments,
            overlap_steps=overlap_steps,
        )
        counts = list(sync_every)
        if below is not None and not one.unsupported:
            step = _prediction(observed, one, costs)
            if step.step_ms is not None and step.exposed_ms is not None:
                alone, exchange = step.step_ms - step.exposed_ms, step.exposed_ms * one.interval
                interval = ceil(exchange * (1 - below) / (below * alone))
                counts.append(fragments * max(one.interval, interval))
        found += [replace(one, sync_every=each) for each in sorted(set(counts))]
    return found


def predict(
    observed: Observed, scenarios: Sequence[Scenario], *, costs: Mapping[str, CodecCost]
) -> Predictions:
    """Simulate the run itself, and then ``scenarios``, which share links and hosts.

    Raises:
        ValueError: the run itself cannot be simulated, so that the error is unknown.
    """
    run, unavailable = observed.scenario, dict(observed.unavailable)
    own = replace(next(iter(scenarios), run), codec=run.codec, form=run.form)
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
        scenarios = [each for each in scenarios_of(own, own) if each != own]
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
    if run.adds_inside or observed.encode is None or observed.decode is None:
        return {cost.name: cost}  # what it does inside a host is in its times
    expected = sum(decoding(cost, sum(run.peers)))
    slower = observed.decode / observed.elements / expected if expected else 1.0
    decode, store = cost.decode * slower, cost.store * slower
    encode = observed.encode / observed.elements
    cost = replace(cost, encode=encode, decode=decode, store=store, source="this run")
    return {cost.name: cost}


def _prediction(
    observed: Observed, scenario: Scenario, costs: Mapping[str, CodecCost]
) -> Prediction:
    needed = [scenario.codec] + ["none"] * scenario.adds_inside
    missing = [name for name in needed if name not in costs]
    reason = f"what {missing[0]} costs was not measured" if missing else scenario.unsupported
    codec, shape = scenario.codec, (scenario.hosts, scenario.world_size, scenario.link.gbps)
    found = Prediction(
        codec,
        scenario.form,
        *shape,
        reason=reason,
        sync_every=scenario.sync_every,
        fragments=scenario.fragments,
        overlap_steps=scenario.overlap_steps,
    )
    if reason:
        return found
    # What the run's own codec took has its share of the core in it.
    one_core = observed.one_core and codec != observed.scenario.codec
    buckets, cost, inside = observed.buckets, costs[codec], costs.get("none")
    if scenario.sync_every:
        step = simulate_local_step(
            buckets,
            scenario,
            tail=observed.tail,
            cost=cost,
            inside_cost=inside,
            one_core=observed.one_core,
        )
    else:
        step = simulate_step(buckets, scenario, cost=cost, inside_cost=inside, one_core=one_core)
    last = max(bucket.ready for bucket in buckets)
    done = max(step.done, last)
    return replace(
        found,
        step_ms=(done + observed.tail) * 1e3,
        exposed_ms=(done - last) * 1e3,
        sent_mb=step.sent / 1e6,
        source=cost.source,
        assumption=LOCAL_STEPS if scenario.sync_every else cost.assumption,
    )


def _ranked(found: Iterable[Prediction], own_ms: float, tolerance: float) -> list[Prediction]:
    """Predictions with positions: one within the tolerance of the one before it shares its own.

    Those of a position that cannot be told from its fastest are listed by what they send, because
    more bytes lose less, first those that are faster than the run's own by more than the tolerance.
    A prediction with an assumption has no position, and comes after all that have.
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
    """Codec, and the form where it is not a flat one as in the run."""
    flat = "" if baseline.form == FLAT else ", flat"
    steps = f" every {count(each.sync_every, 'step')}" if each.sync_every else ""
    steps += f" in {each.fragments} fragments" if each.fragments > 1 else ""
    steps += f" with {count(each.overlap_steps, 'step')} overlap" if each.overlap_steps else ""
    if each.form == FSDP:
        return each.codec
    words = each.codec + steps + (flat if each.form == FLAT else " between hosts")
    return f"{words}, leader form" if each.form == LEADER else words


def where(each: Prediction) -> str:
    """Hosts of a scenario, and the rate of their links."""
    between = "between them" if each.hosts > 1 else "per rank, no network"
    ranks, hosts = count(each.world_size, "rank"), count(each.hosts, "host")
    return f"{ranks} on {hosts}, {format_value(each.gbps, 'Gbit/s')} {between}"


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
