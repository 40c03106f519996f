"""A profiled run in numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec.structs import asdict

from lightning_dist.profiling.analysis.breakdown import timeline
from lightning_dist.profiling.analysis.clock_quality import mean_uncertainty, uncertainty_of
from lightning_dist.profiling.analysis.imbalance import find_phase_skew, straggler
from lightning_dist.profiling.analysis.notes import headline, notes_of
from lightning_dist.profiling.analysis.parts import (
    EXPOSED,
    PARTS,
    PerStep,
    RankSummary,
    Summary,
    Timeline,
    Unavailable,
)
from lightning_dist.profiling.analysis.sample import MOST, Sample, sample, spread
from lightning_dist.profiling.analysis.tables import MS, StepTable, mean, step_table
from lightning_dist.profiling.analysis.traffic import gbps, gone, traffic_of
from lightning_dist.profiling.capture.events import PHASES, StepRecord
from lightning_dist.profiling.run import Run

_LEAST_WAITING = 0.02
"""Share of the step below which nobody is called a straggler."""


def summarize(run: Run, *, warmup_steps: int = 2) -> Summary:
    """What can be said of it; ``unavailable`` and ``notes`` say what cannot, and why.

    Args:
        warmup_steps: first steps to leave out: DDP builds its buckets anew after the first.

    Raises:
        ValueError: ``warmup_steps`` is negative.
    """
    chosen = sample(run, warmup_steps=warmup_steps)
    table = step_table(run, chosen.detailed)
    unavailable = _unavailable(run, chosen, table)
    per_step = _per_step(chosen, table, unavailable)
    breakdown_ms = _breakdown_ms(chosen, table, per_step, unavailable)
    exchange = table.total("exchange")
    traffic = traffic_of(run, table, unavailable)
    phase_skew = find_phase_skew(table)
    uncertainty = mean_uncertainty(run, table.steps)
    last, why_none = straggler(
        table, table.late, phase_skew=phase_skew, uncertainty=uncertainty, least=_LEAST_WAITING
    )
    exposed_last, _ = straggler(
        table, table.exposed_late, phase_skew=phase_skew, uncertainty=uncertainty
    )
    if last is None:
        nobody = unavailable.get("exposed_wait") or _alone(run) or Unavailable.NO_WAITING
        unavailable["straggler"] = why_none or nobody
    overhead = _overhead(chosen)
    is_unknown = "exposed_ms" in unavailable or not chosen.detailed
    summary = Summary(
        headline="",
        run=_about(run),
        steps=len(chosen.steps),
        warmup_steps=chosen.warmup_steps,
        step_ms=_step_ms(chosen),
        breakdown_ms=breakdown_ms,
        exposed_ms=None if is_unknown else sum(breakdown_ms[name] or 0.0 for name in EXPOSED),
        hidden_ms=None if is_unknown else table.total("hidden") / table.cells / MS,
        overlap_fraction=table.total("hidden") / exchange if exchange else None,
        traffic=traffic,
        ranks=_ranks(chosen, table, unavailable, missing=bool(gone(run, chosen.ranks))),
        buckets=table.bucket_summaries(unavailable),
        straggler=last,
        detailed_steps=len(chosen.detailed or _spread(chosen)) if breakdown_ms else 0,
        exposed_straggler=exposed_last,
        profiler_overhead=overhead,
        per_step=per_step,
        errors=[
            {"rank": rank, **asdict(each)} for rank, of in run.ranks.items() for each in of.errors
        ],
        links=[
            {"rank": rank, **asdict(each)} for rank, of in run.ranks.items() for each in of.links
        ],
        unavailable=unavailable,
        notes=notes_of(
            run,
            chosen,
            table,
            phase_skew=phase_skew,
            overhead=overhead,
            has_rates=traffic is not None,
        ),
        phase_skew=phase_skew,
    )
    return replace(summary, headline=headline(summary, of_steps=chosen.cut))


def pick_steps(run: Run, summary: Summary) -> list[Timeline]:
    """The steps whose durations are nearest to the median and to the p95, and the slowest."""
    steps, step_ms = summary.per_step.steps, summary.per_step.step_ms
    picked: dict[int, str] = {}
    wanted = {**summary.step_ms, "slowest": max(step_ms, default=None)}
    for name in ("median", "p95", "slowest"):
        duration = wanted[name]
        if duration is not None and step_ms:
            distances = [abs(each - duration) for each in step_ms]
            picked.setdefault(steps[distances.index(min(distances))], f"{name} step")
    return [timeline(run, step, label) for step, label in picked.items()]


def _unavailable(run: Run, chosen: Sample, table: StepTable) -> dict[str, str]:
    """By field, why it is None; all but those of traffic and of the straggler."""
    unavailable: dict[str, str] = {}
    no_bucket = run.unseen or Unavailable.NO_BUCKET
    if chosen.reason:
        for name in ("breakdown_ms", "exposed_ms", "hidden_ms", "exposed_wait", "traffic"):
            unavailable[name] = chosen.reason
    if table.unknown_wait:
        unavailable["exposed_wait"] = table.unknown_wait
    if not chosen.steps:
        unavailable["step_ms"] = unavailable["profiler_overhead"] = chosen.reason or ""
        unavailable["steps"] = chosen.whole_reason
    if not table.buckets:
        unavailable["buckets"] = chosen.reason or _alone(run) or no_bucket
    if table.is_blind and run.world_size > 1:
        for name in ("breakdown_ms", "exposed_ms", "hidden_ms", "exposed_wait"):
            unavailable[name] = no_bucket
    if chosen.detailed and (run.is_stock or run.unseen):
        unavailable["exposed_codec"] = Unavailable.STOCK if run.is_stock else run.unseen
    if chosen.detailed and not any(map(_has_forward, _records(chosen))):
        unavailable["forward"] = Unavailable.IN_BACKWARD
    if not table.total("exchange"):
        unavailable["overlap_fraction"] = chosen.reason or _alone(run) or Unavailable.NO_EXCHANGE
    if not any(each.errors for each in run.ranks.values()):
        unavailable["errors"] = _why_no_errors(run, chosen)
    if not any(each.links for each in run.ranks.values()):
        unavailable["links"] = Unavailable.NO_LINK
    return unavailable


def _alone(run: Run) -> str:
    return Unavailable.ALONE if run.world_size < 2 else ""


def _why_no_errors(run: Run, chosen: Sample) -> str:
    if run.unseen or run.is_stock:
        return run.unseen or Unavailable.STOCK
    last = [each.steps[step] for each in chosen.ranks.values() for step in chosen.detailed[-1:]]
    is_whole = {bucket.codec for step in last for bucket in step.buckets} == {"none"}
    return Unavailable.NOT_COMPRESSED if is_whole else Unavailable.NOT_SAMPLED


def _about(run: Run) -> dict[str, Any]:
    if not run.ranks:
        return {}
    about = run.ranks[min(run.ranks)].metadata
    hosts = {rank: each.metadata.host for rank, each in run.ranks.items()}
    return {
        "codec": about.codec,
        "backend": about.backend,
        "device": about.device,
        "world_size": run.world_size,
        "hosts": [hosts.get(rank) for rank in range(run.world_size)],
        "script": about.script,
        "started": about.started,
        "versions": dict(about.versions),
    }


def _per_step(chosen: Sample, table: StepTable, unavailable: Mapping[str, str]) -> PerStep:
    """Without parts that are not known, or zero where ``unavailable`` says that they are not."""
    if not chosen.detailed:
        return PerStep(chosen.steps, chosen.durations_ms(), {}, {}, [None] * len(chosen.steps))

    def means(part: str) -> list[float]:
        return [mean(of_ranks) for of_ranks in (table.of(part) / MS).tolist()]

    blind = EXPOSED if "breakdown_ms" in unavailable else ()
    breakdown_ms = {name: means(name) for name in PARTS if name not in blind}
    waited = (table.of("waited") / MS).T
    has_waits = "exposed_wait" not in unavailable or waited.any()
    return PerStep(
        chosen.detailed,
        means("duration"),
        {name: of for name, of in breakdown_ms.items() if name not in unavailable or any(of)},
        dict(zip(table.ranks, waited.tolist(), strict=True)) if has_waits else {},
        [table.ranks[int(late.argmax())] if late.any() else None for late in table.late],
    )


def _breakdown_ms(
    chosen: Sample, table: StepTable, per_step: PerStep, unavailable: Mapping[str, str]
) -> dict[str, float | None]:
    """Without detail of the phases alone; ``backward`` has the exposed communication in it then."""
    if not chosen.detailed:
        return _mean_phases_ms(_records(chosen))
    blind = EXPOSED if "breakdown_ms" in unavailable else ()
    return {
        name: table.total(name) / table.cells / MS if name in per_step.breakdown_ms else None
        for name in PARTS
        if name not in blind
    }


def _step_ms(chosen: Sample) -> dict[str, float | None]:
    durations = sorted(chosen.durations_ms())
    if not durations:
        return {"mean": None, "median": None, "p95": None}
    return {
        "mean": mean(durations),
        "median": statistics.median(durations),
        "p95": durations[math.ceil(0.95 * len(durations)) - 1],
    }


def _mean_phases_ms(records: Sequence[StepRecord]) -> dict[str, float | None]:
    """Empty if phases were not recorded."""
    if not any(record.phases for record in records):
        return {}
    sums = dict.fromkeys(PHASES, 0)
    for record in records:
        for phase in record.phases:
            if phase.name in sums:
                sums[phase.name] += phase.end - phase.begin
    sums["other"] = sum(each.duration for each in records) - sum(sums.values())
    return {name: total / len(records) / MS for name, total in sums.items()}


def _ranks(
    chosen: Sample, table: StepTable, unavailable: Mapping[str, str], *, missing: bool
) -> list[RankSummary]:
    def known(value: float | None, name: str) -> float | None:
        return None if not value and name in unavailable else value

    steps_of_parts = chosen.detailed or chosen.steps
    per_step = max(len(table.steps), 1) * MS
    summaries = []
    for row, (rank, of_rank) in enumerate(chosen.ranks.items()):
        totals = {name: float(table.of_ranks(name)[row]) for name in _OF_RANKS}
        uncertainty = uncertainty_of(of_rank, steps_of_parts)
        phases: Mapping[str, float | None]
        if table.steps:
            phases = {name: totals[name] / len(table.steps) / MS for name in PHASES}
        else:
            phases = _mean_phases_ms([of_rank.steps[step] for step in _spread(chosen)])
        summaries.append(
            RankSummary(
                rank,
                of_rank.metadata.host,
                step_ms=mean([of_rank.head(step).duration / MS for step in steps_of_parts]),
                exposed_ms=None if "exposed_ms" in unavailable else totals["exposed"] / per_step,
                wait_ms=known(totals["waited"] / per_step, "exposed_wait"),
                waited_for_ms=known(float(table.late[:, row].sum()) / per_step, "exposed_wait"),
                clock_uncertainty_ms=None if uncertainty is None else uncertainty / MS,
                # With ranks missing it is not known what of the time was waiting for them.
                intra_gbps=None if missing else gbps(totals["intra"], totals["intra_moving"]),
                inter_gbps=None if missing else gbps(totals["inter"], totals["inter_moving"]),
                phases_ms={name: known(phases[name], name) for name in PHASES if phases},
            )
        )
    return summaries


_OF_RANKS = (*PHASES, "exposed", "waited", "intra", "intra_moving", "inter", "inter_moving")


def _records(chosen: Sample) -> list[StepRecord]:
    """Of as many steps as are looked at in detail: to parse all would take long."""
    return [each.steps[step] for each in chosen.ranks.values() for step in _spread(chosen)]


def _spread(chosen: Sample) -> list[int]:
    return spread(chosen.steps, MOST)


def _has_forward(record: StepRecord) -> bool:
    return any(phase.name == "forward" for phase in record.phases)


def _overhead(chosen: Sample) -> float | None:
    records = [each.head(step) for each in chosen.ranks.values() for step in chosen.steps]
    duration = sum(each.duration for each in records)
    return sum(each.overhead for each in records) / duration if duration else None
