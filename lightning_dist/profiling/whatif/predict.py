"""Predictions of a run with other settings, from the costs on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from lightning_dist.base.shared_folder import replace_file
from lightning_dist.measurement import CANDIDATES, CodecCost
from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.observe import IN_RUN, Observed, ObservedShards, observe
from lightning_dist.profiling.whatif.scenarios import (
    ALL_RANKS,
    DDP,
    FLAT,
    FSDP,
    HIERARCHICAL,
    LEADER,
    Prediction,
    Predictions,
    Scenario,
    headline,
    scenarios_of,
)
from lightning_dist.profiling.whatif.simulator import (
    FREE,
    decoding,
    simulate_local_step,
    simulate_shards,
    simulate_step,
)

if TYPE_CHECKING:
    import torch


NAME = "costs.json"
LEAST_TRAINING = 30.0
"""Seconds: a shorter one is a trial, and nobody wants to wait at its end."""

LARGEST_SHARE, LONGEST = 0.1, 30.0
"""Share of the training, and seconds, after which measuring begins with no further codec. One that
is compiled takes up to 20 seconds the first time."""


class Costs(msgspec.Struct, frozen=True):
    """Codec costs by name, and the reason why some or all are missing: ``costs.json``.

    Args:
        status: whether the run has measured them, and ``reason`` says which are missing; if not,
            there are none.
    """

    by_name: dict[str, CodecCost] = msgspec.field(default_factory=dict, name="costs")
    reason: str = ""
    status: Literal["measured", "not measured", "unreadable"] = "measured"
    schema: Literal[2] = 2


def write_costs(folder: str | Path, costs: Costs) -> None:
    """Write ``costs.json``."""
    text = msgspec.json.format(msgspec.json.encode(costs), indent=2)
    replace_file(Path(folder) / NAME, text + b"\n")


def read_costs(folder: str | Path) -> Costs:
    """Costs from ``costs.json``; none, and the reason, where it cannot be used."""
    try:
        return msgspec.json.decode((Path(folder) / NAME).read_bytes(), type=Costs)
    except FileNotFoundError:
        return Costs(reason="codec costs were not measured", status="not measured")
    except OSError as error:
        reason = f"{NAME} cannot be read: {error.strerror}"
    except msgspec.MsgspecError:
        reason = f"{NAME} is damaged or of another version"
    return Costs(reason=reason, status="unreadable")


def runs_compiled(observed: Observed, wish: bool | Literal["auto"] = "auto") -> bool:
    """True if gradients as large as those of a run get compiled kernels on a device like its own.

    Args:
        wish: ``compile_kernels`` of the run.
    """
    import torch

    from lightning_dist.kernels.inductor import should_fuse

    return should_fuse(wish, numel=round(observed.elements), device=torch.device(observed.device))


def measure_costs(
    run: Run,
    observed: Observed,
    *,
    fused: bool,
    device: torch.device,
    clock: Callable[[], float] = time.monotonic,
) -> Costs:
    """Costs of all candidates, the run's own codec first, or why there are none. Never raises.

    Args:
        fused: compile the kernels first, as :func:`runs_compiled` says.
        device: that has trained.
        clock: seconds.
    """
    from lightning_dist.measurement.calibration import calibrate, to_measure

    trained = seconds_of(run)
    if trained < LEAST_TRAINING:
        reason = f"the training was shorter than {LEAST_TRAINING:g} s"
        return Costs(reason=reason, status="not measured")
    where = f"on {run.ranks[min(run.ranks)].metadata.node} after this run"
    until = clock() + min(LONGEST, LARGEST_SHARE * trained)
    costs: dict[str, CodecCost] = {}
    problems = []
    of_parameters = filter(None, [observed.scenario.parameters])
    names = to_measure([*CANDIDATES, *of_parameters], observed.scenario.codec)
    for number, name in enumerate(names):
        if number and clock() > until:
            problems.append(f"no time was left to measure {', '.join(names[number:])}")
            break
        try:
            costs |= calibrate([name], fused=fused, where=where, device=device)
        except Exception as error:  # a training must not fail by what comes after it
            problems.append(f"measuring {name} failed: {type(error).__name__}: {error}")
    return Costs(costs, "; ".join(problems))


def seconds_of(run: Run) -> float:
    """Duration from the first recorded step to the end of the last, on the longest rank."""
    longest = 0
    for of_rank in (rank_run for rank_run in run.ranks.values() if rank_run.steps):
        last = of_rank.head(max(of_rank.steps))
        longest = max(longest, last.begin + last.duration - of_rank.head(min(of_rank.steps)).begin)
    return longest / 1e9


MEASURES = "`lightning-dist profile whatif DIR` measures"
"""Remedy where costs are missing."""

LOCAL_STEPS = "local steps, which change the training"
"""Assumption of their predictions."""

LEAST_TOLERANCE = 0.02
"""Two runs of the same scenario differ by as much, however exact the model is for one of them."""


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
    """Local steps on the links and nodes of ``there``, for every codec whose cost is known.

    Args:
        form: of the exchange; None: by nodes where that can be.
        sync_every: local steps between two exchanges.
        below: for every codec also the least number of them with which waiting for the exchange
            takes no more than this share of the time.
        fragments: parts of the model that are exchanged in turn.
        overlap_steps: local steps that an exchange has before training waits for it.

    Raises:
        ValueError: one of them is out of range.
    """
    if there.form in (FSDP, ALL_RANKS) and (sync_every or below is not None):
        raise ValueError(
            "local steps are of a model that every rank holds as a whole, and the model of this "
            "run is sharded; leave --local-steps and --below out"
        )
    if fragments < 1 or overlap_steps < 0:
        raise ValueError(
            f"fragments must be 1 or more and overlap_steps 0 or more, got {fragments} and "
            f"{overlap_steps}"
        )
    if any(steps < 1 for steps in sync_every):
        raise ValueError(f"Local steps must be 1 or more, got {min(sync_every)}")
    if below is not None and not 0 < below < 1:
        raise ValueError(f"The share of waiting must be between 0 and 100 %, got {below:.0%}")
    if form is None:
        known = (replace(there, codec="none", form=form) for form in (HIERARCHICAL, LEADER, FLAT))
        form = next(scenario.form for scenario in known if not scenario.unsupported)
    scenarios = []
    for codec in codecs or CANDIDATES:
        if codec == DDP or codec not in costs:
            continue
        scenario = replace(
            there,
            codec=codec,
            form=form,
            sync_every=fragments * (overlap_steps + 1),
            fragments=fragments,
            overlap_steps=overlap_steps,
        )
        counts = list(sync_every)
        if below is not None and not scenario.unsupported:
            step = _prediction(observed, scenario, costs)
            if step.step_ms is not None and step.exposed_ms is not None:
                alone = step.step_ms - step.exposed_ms
                exchange = step.exposed_ms * scenario.interval
                interval = ceil(exchange * (1 - below) / (below * alone))
                counts.append(fragments * max(scenario.interval, interval))
        scenarios += [replace(scenario, sync_every=steps) for steps in sorted(set(counts))]
    return scenarios


def predict(
    observed: Observed, scenarios: Sequence[Scenario], *, costs: Mapping[str, CodecCost]
) -> Predictions:
    """Simulate the run itself, and then ``scenarios``, which share links and nodes.

    Raises:
        ValueError: the run itself cannot be simulated, so that the error is unknown.
    """
    run, unavailable = observed.scenario, dict(observed.unavailable)
    own = replace(
        next(iter(scenarios), run), codec=run.codec, form=run.form, parameters=run.parameters
    )
    there = own.link, own.counts
    assert all((scenario.link, scenario.counts) == there for scenario in scenarios)
    known = {DDP: FREE, **costs, **_cost_in_run(observed, costs)}
    baseline, moved = (_prediction(observed, scenario, known) for scenario in (run, own))
    if baseline.step_ms is None or moved.step_ms is None:
        reason = baseline.reason or moved.reason
        raise ValueError(f"This run cannot be simulated: {reason}")
    error = baseline.step_ms / (observed.step * 1e3) - 1
    tolerance = max(abs(error), LEAST_TOLERANCE)
    predictions = [_prediction(observed, scenario, known) for scenario in scenarios]
    ranked = _ranked(predictions, moved.step_ms, tolerance)
    if run.nodes == 1 and own.nodes > 1 and own.link.latency is None:
        unavailable["latency"] = (
            "the run was on one node; latency between nodes is 0 without --latency-us"
        )
    link = {
        "gbps": run.link.gbps,
        "inside_gbps": None if run.inside is None else run.inside.gbps,
        "latency_us": None if run.link.latency is None else run.link.latency * 1e6,
    }
    return Predictions(observed.step * 1e3, baseline, error, tolerance, ranked, link, unavailable)


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
        scenarios = [scenario for scenario in scenarios_of(own, own) if scenario != own]
        predictions = predict(observed, scenarios, costs=known.by_name)
    except Exception as error:  # the rest of the report is worth more than this part of it
        reason = f"the prediction failed: {type(error).__name__}: {error}"
        reason = str(error) if isinstance(error, ValueError) else reason
        return replace(summary, unavailable={**summary.unavailable, "predictions": reason})
    if known.reason:
        unavailable = {**predictions.unavailable, "costs": f"{known.reason}; {MEASURES}"}
        predictions = replace(predictions, unavailable=unavailable)
    words = " ".join(filter(None, (summary.headline, headline(predictions))))
    return replace(summary, predictions=predictions, headline=words)


def _cost_in_run(observed: Observed, costs: Mapping[str, CodecCost]) -> dict[str, CodecCost]:
    """Cost of the run's own codec, with the bytes and times of the run."""
    run = observed.scenario
    cost = costs.get(run.codec)
    if cost is None or run.unsupported or run.form == ALL_RANKS:
        return {}
    step = simulate_step(observed.buckets, run, cost=cost, inside_cost=costs.get("none"))
    cost = replace(cost, wire=cost.wire * observed.sent / step.sent, assumption="")
    if run.adds_inside or observed.encode is None or observed.decode is None:
        return {cost.name: cost}  # what it does inside a node is in its times
    expected = sum(decoding(cost, sum(run.peers)))
    slower = observed.decode / observed.elements / expected if expected else 1.0
    decode, store = cost.decode * slower, cost.store * slower
    encode = observed.encode / observed.elements
    cost = replace(cost, encode=encode, decode=decode, store=store, source=IN_RUN)
    return {cost.name: cost}


def _prediction(
    observed: Observed, scenario: Scenario, costs: Mapping[str, CodecCost]
) -> Prediction:
    unknown = Prediction(
        scenario.codec,
        scenario.form,
        scenario.nodes,
        scenario.world_size,
        scenario.link.gbps,
        sync_every=scenario.sync_every,
        fragments=scenario.fragments,
        overlap_steps=scenario.overlap_steps,
        parameters=scenario.parameters,
    )
    if observed.shards is not None:
        return _of_shards(unknown, observed, observed.shards, scenario, costs)
    needed = [scenario.codec] + ["none"] * scenario.adds_inside
    missing = [name for name in needed if name not in costs]
    reason = f"the cost of {missing[0]} was not measured" if missing else scenario.unsupported
    if reason:
        return replace(unknown, reason=reason)
    buckets, one_core = observed.buckets, observed.one_core
    cost, inside = costs[scenario.codec], costs.get("none")
    is_own = scenario.codec == observed.scenario.codec
    if not is_own:
        cost = cost.scaled(observed.crowded)  # all ranks of a node at the same time
    if scenario.sync_every:
        step = simulate_local_step(
            buckets, scenario, tail=observed.tail, cost=cost, inside_cost=inside, one_core=one_core
        )
    else:
        # What the run's own codec took has its share of the core in it.
        one_core = one_core and not is_own
        step = simulate_step(buckets, scenario, cost=cost, inside_cost=inside, one_core=one_core)
    last = max(bucket.ready for bucket in buckets)
    done = max(step.done, last)
    return replace(
        unknown,
        step_ms=(done + observed.tail) * 1e3,
        exposed_ms=(done - last) * 1e3,
        sent_mb=step.sent / 1e6,
        source=cost.source,
        assumption=LOCAL_STEPS if scenario.sync_every else cost.assumption,
    )


def _of_shards(
    unknown: Prediction,
    observed: Observed,
    shards: ObservedShards,
    scenario: Scenario,
    costs: Mapping[str, CodecCost],
) -> Prediction:
    run = observed.scenario

    def cost_of(name: str, own: str, measured: CodecCost) -> CodecCost | None:
        if name == own:
            return measured
        # All ranks of a node compress at the same time, and share its cores.
        return costs[name].scaled(observed.crowded) if name in costs else None

    gradients = cost_of(scenario.codec, run.codec, shards.gradients)
    parameters = (
        FREE
        if scenario.codec == DDP
        else cost_of(scenario.parameters, run.parameters, shards.parameters)
    )
    if gradients is None or parameters is None:
        missing = scenario.codec if gradients is None else scenario.parameters
        return replace(unknown, reason=f"the cost of {missing} was not measured")
    step = simulate_shards(shards.collectives, scenario, parameters=parameters, gradients=gradients)
    compute = sum(collective.compute for collective in shards.collectives)
    return replace(
        unknown,
        step_ms=(step.done + shards.tail) * 1e3,
        exposed_ms=(step.done - compute) * 1e3,
        sent_mb=step.sent / 1e6,
        source=gradients.source,
    )


def _ranked(predictions: Iterable[Prediction], own_ms: float, tolerance: float) -> list[Prediction]:
    """Predictions with positions: one within the tolerance of the one before it shares its own.

    Those of a position that cannot be distinguished from its fastest are listed by what they send,
    because more bytes lose less, first those that are faster than the run's own by more than the
    tolerance.
    A prediction with an assumption has no position, and comes after all that have.
    """
    position, fastest, before, number = 0, 0.0, -inf, 0
    ordered: list[tuple[tuple[float, ...], Prediction]] = []
    for prediction in sorted(predictions, key=lambda prediction: prediction.step_ms or inf):
        step, sent = prediction.step_ms, prediction.sent_mb
        if step is None or sent is None:
            ordered.append(((inf, 1.0), prediction))
            continue
        change = step / own_ms - 1
        if prediction.assumption:
            ordered.append(((inf, 0.0), replace(prediction, change=change)))
            continue
        number += 1
        if step > before * (1 + tolerance):
            position, fastest = number, step
        before = step
        order: tuple[float, ...] = position, 2.0, step
        if step <= fastest * (1 + tolerance):
            order = position, float(change >= -tolerance), -round(sent, 6)  # to a byte
        ordered.append((order, replace(prediction, change=change, position=position)))
    return [prediction for _, prediction in sorted(ordered, key=lambda pair: pair[0])]
