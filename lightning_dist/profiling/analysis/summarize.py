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
from lightning_dist.profiling.analysis.imbalance import straggler, uneven_phases
from lightning_dist.profiling.analysis.notes import headline, notes_of
from lightning_dist.profiling.analysis.parts import (
    EXPOSED,
    PARTS,
    RankSummary,
    Series,
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


def summarize(run: Run, *, skip: int = 2) -> Summary:
    """What can be said of it; ``reasons`` and ``notes`` say what cannot, and why.

    Args:
        skip: first steps to leave out: DDP builds its buckets anew after the first.

    Raises:
        ValueError: ``skip`` is negative.
    """
    chosen = sample(run, skip=skip)
    table = step_table(run, chosen.detailed)
    reasons = _reasons(run, chosen, table)
    series = _series(chosen, table, reasons)
    parts_ms = _parts_ms(chosen, table, series, reasons)
    exchange = table.total("exchange")
    traffic = traffic_of(run, table, reasons)
    uneven = uneven_phases(table)
    uncertainty = mean_uncertainty(run, table.steps)
    last, why_none = straggler(
        table, table.late, uneven=uneven, uncertainty=uncertainty, least=_LEAST_WAITING
    )
    exposed_last, _ = straggler(table, table.exposed_late, uneven=uneven, uncertainty=uncertainty)
    if last is None:
        nobody = reasons.get("wait") or _alone(run) or Unavailable.NO_WAITING
        reasons["straggler"] = why_none or nobody
    overhead = _overhead(chosen)
    is_unknown = "exposed_ms" in reasons or not chosen.detailed
    summary = Summary(
        headline="",
        run=_about(run),
        steps=len(chosen.steps),
        skipped=chosen.skipped,
        step_ms=_step_ms(chosen),
        parts_ms=parts_ms,
        exposed_ms=None if is_unknown else sum(parts_ms[name] or 0.0 for name in EXPOSED),
        hidden_ms=None if is_unknown else table.total("hidden") / table.cells / MS,
        overlap=table.total("hidden") / exchange if exchange else None,
        traffic=traffic,
        ranks=_ranks(chosen, table, reasons, missing=bool(gone(run, chosen.ranks))),
        buckets=table.bucket_summaries(reasons),
        straggler=last,
        parts_steps=len(chosen.detailed or _spread(chosen)) if parts_ms else 0,
        exposed_straggler=exposed_last,
        overhead=overhead,
        series=series,
        errors=[
            {"rank": rank, **asdict(each)} for rank, of in run.ranks.items() for each in of.errors
        ],
        links=[
            {"rank": rank, **asdict(each)} for rank, of in run.ranks.items() for each in of.links
        ],
        reasons=reasons,
        notes=notes_of(
            run, chosen, table, uneven=uneven, overhead=overhead, has_rates=traffic is not None
        ),
        uneven=uneven,
    )
    return replace(summary, headline=headline(summary, of_steps=chosen.cut))


def pick_steps(run: Run, summary: Summary) -> list[Timeline]:
    """The steps whose durations are nearest to the median and to the p95, and the slowest."""
    steps, step_ms = summary.series.steps, summary.series.step_ms
    picked: dict[int, str] = {}
    wanted = {**summary.step_ms, "slowest": max(step_ms, default=None)}
    for name in ("median", "p95", "slowest"):
        duration = wanted[name]
        if duration is not None and step_ms:
            distances = [abs(each - duration) for each in step_ms]
            picked.setdefault(steps[distances.index(min(distances))], f"{name} step")
    return [timeline(run, step, label) for step, label in picked.items()]


def _reasons(run: Run, chosen: Sample, table: StepTable) -> dict[str, str]:
    """By field, why it is None; all but those of traffic and of the straggler."""
    reasons: dict[str, str] = {}
    no_bucket = run.unseen or Unavailable.NO_BUCKET
    if chosen.reason:
        for name in ("parts_ms", "exposed_ms", "hidden_ms", "wait", "traffic"):
            reasons[name] = chosen.reason
    if table.unknown_wait:
        reasons["wait"] = table.unknown_wait
    if not chosen.steps:
        reasons["step_ms"] = reasons["overhead"] = chosen.reason or ""
        reasons["steps"] = chosen.whole_reason
    if not table.buckets:
        reasons["buckets"] = chosen.reason or _alone(run) or no_bucket
    if table.is_blind and run.world_size > 1:
        for name in ("parts_ms", "exposed_ms", "hidden_ms", "wait"):
            reasons[name] = no_bucket
    if chosen.detailed and (run.is_stock or run.unseen):
        reasons["codec"] = Unavailable.STOCK if run.is_stock else run.unseen
    if chosen.detailed and not any(map(_has_forward, _records(chosen))):
        reasons["forward"] = Unavailable.IN_BACKWARD
    if not table.total("exchange"):
        reasons["overlap"] = chosen.reason or _alone(run) or Unavailable.NO_EXCHANGE
    if not any(each.errors for each in run.ranks.values()):
        reasons["errors"] = _why_no_errors(run, chosen)
    if not any(each.links for each in run.ranks.values()):
        reasons["links"] = Unavailable.NO_LINK
    return reasons


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


def _series(chosen: Sample, table: StepTable, reasons: Mapping[str, str]) -> Series:
    """Without parts that are not known, or zero where ``reasons`` say that they are not."""
    if not chosen.detailed:
        return Series(chosen.steps, chosen.durations_ms(), {}, {}, [None] * len(chosen.steps))

    def means(part: str) -> list[float]:
        return [mean(of_ranks) for of_ranks in (table.of(part) / MS).tolist()]

    blind = EXPOSED if "parts_ms" in reasons else ()
    parts_ms = {name: means(name) for name in PARTS if name not in blind}
    waited = (table.of("waited") / MS).T
    has_waits = "wait" not in reasons or waited.any()
    return Series(
        chosen.detailed,
        means("duration"),
        {name: of for name, of in parts_ms.items() if name not in reasons or any(of)},
        dict(zip(table.ranks, waited.tolist(), strict=True)) if has_waits else {},
        [table.ranks[int(late.argmax())] if late.any() else None for late in table.late],
    )


def _parts_ms(
    chosen: Sample, table: StepTable, series: Series, reasons: Mapping[str, str]
) -> dict[str, float | None]:
    """Without detail of the phases alone; ``backward`` has the exposed communication in it then."""
    if not chosen.detailed:
        return _mean_phases_ms(_records(chosen))
    blind = EXPOSED if "parts_ms" in reasons else ()
    return {
        name: table.total(name) / table.cells / MS if name in series.parts_ms else None
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
    chosen: Sample, table: StepTable, reasons: Mapping[str, str], *, missing: bool
) -> list[RankSummary]:
    def known(value: float | None, name: str) -> float | None:
        return None if not value and name in reasons else value

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
                exposed_ms=None if "exposed_ms" in reasons else totals["exposed"] / per_step,
                wait_ms=known(totals["waited"] / per_step, "wait"),
                caused_ms=known(float(table.late[:, row].sum()) / per_step, "wait"),
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
