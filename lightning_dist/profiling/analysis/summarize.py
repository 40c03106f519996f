"""A profiled run in numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lightning_dist.profiling.analysis.breakdown import timeline
from lightning_dist.profiling.analysis.clock_check import mean_uncertainty, uncertainty_of
from lightning_dist.profiling.analysis.findings import Findings, look
from lightning_dist.profiling.analysis.notes import headline, notes_of
from lightning_dist.profiling.analysis.parts import (
    EXPOSED,
    PARTS,
    RankSummary,
    Series,
    Summary,
    Timeline,
    Uneven,
)
from lightning_dist.profiling.analysis.sample import MOST, Sample, sample, spread
from lightning_dist.profiling.analysis.stragglers import Waits
from lightning_dist.profiling.analysis.totals import MS, RankTotals, mean
from lightning_dist.profiling.analysis.traffic import gbps, gone, traffic_of
from lightning_dist.profiling.analysis.uneven import uneven_phases, waits_explain
from lightning_dist.profiling.capture.records import PHASES, StepRecord
from lightning_dist.profiling.folder import Run

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
    found = look(run, chosen)
    reasons: dict[str, str] = {}
    if chosen.reason:
        for name in ("parts_ms", "exposed_ms", "hidden_ms", "wait", "traffic"):
            reasons[name] = chosen.reason
    if found.unknown_wait:
        reasons["wait"] = found.unknown_wait
    if not chosen.steps:
        reasons["step_ms"] = reasons["overhead"] = chosen.reason
        reasons["steps"] = chosen.whole_reason
    if not found.buckets:
        reasons["buckets"] = chosen.reason or _why_nothing(run, _no_bucket(run))
    if found.is_blind and run.world_size > 1:
        for name in ("parts_ms", "exposed_ms", "hidden_ms", "wait"):
            reasons[name] = _no_bucket(run)
        found.forget_exposed()
    if chosen.detailed and run.is_stock:
        reasons["codec"] = "DDP itself exchanges the gradients, without a codec"
    elif chosen.detailed and run.unseen:
        reasons["codec"] = run.unseen
    if chosen.detailed and not any(map(_has_forward, _records(chosen))):
        reasons["forward"] = "the passes ran within each other; both are in backward"
    found.leave_out(reasons)
    parts_ms = _parts_ms(chosen, found, reasons)
    step_ms = _step_ms(chosen)
    under_way = sum(each.union for each in found.ranks.values())
    hidden = sum(each.hidden for each in found.ranks.values())
    if not under_way:
        reasons["overlap"] = chosen.reason or _why_nothing(run)
    if not any(each.errors for each in run.ranks.values()):
        reasons["errors"] = _why_no_errors(run, chosen)
    if not any(each.links for each in run.ranks.values()):
        reasons["links"] = "no link was measured"
    traffic = traffic_of(run, found.ranks, reasons, moving_of_hosts=found.moving_of_hosts)
    uneven = uneven_phases(found)
    straggler = _straggler(run, found, uneven, reasons)
    overhead = _overhead(chosen)
    is_unknown = "exposed_ms" in reasons or not chosen.detailed
    summary = Summary(
        headline="",
        run=_about(run),
        steps=len(chosen.steps),
        skipped=chosen.skipped,
        step_ms=step_ms,
        parts_ms=parts_ms,
        exposed_ms=None if is_unknown else sum(parts_ms[name] or 0.0 for name in EXPOSED),
        hidden_ms=None if is_unknown else hidden / found.steps / MS,
        overlap=hidden / under_way if under_way else None,
        traffic=traffic,
        ranks=_ranks(chosen, found, reasons, missing=bool(gone(run, chosen.ranks))),
        buckets=[found.buckets[index].summary(index, reasons) for index in sorted(found.buckets)],
        straggler=straggler,
        parts_steps=len(chosen.detailed or _spread(chosen)) if parts_ms else 0,
        exposed_straggler=_exposed_straggler(run, found, uneven),
        overhead=overhead,
        series=found.series if chosen.detailed else _series_of_durations(chosen),
        errors=[
            {"rank": rank, **asdict(each)} for rank, of in run.ranks.items() for each in of.errors
        ],
        links=[
            {"rank": rank, **asdict(each)} for rank, of in run.ranks.items() for each in of.links
        ],
        reasons=reasons,
        notes=notes_of(
            run, chosen, found, uneven=uneven, overhead=overhead, has_rates=traffic is not None
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


def _about(run: Run) -> dict[str, Any]:
    if not run.ranks:
        return {}
    about = run.ranks[min(run.ranks)].about
    hosts = {rank: each.about.host for rank, each in run.ranks.items()}
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


def _parts_ms(
    chosen: Sample, found: Findings, reasons: Mapping[str, str]
) -> Mapping[str, float | None]:
    if not chosen.detailed:
        return _phases_ms(chosen)
    known = found.parts_ms()
    blind = EXPOSED if "parts_ms" in reasons else ()
    return {name: known.get(name) for name in PARTS if name not in blind}


def _step_ms(chosen: Sample) -> dict[str, float | None]:
    durations = sorted(chosen.durations_ms())
    if not durations:
        return {"mean": None, "median": None, "p95": None}
    return {
        "mean": mean(durations),
        "median": statistics.median(durations),
        "p95": durations[math.ceil(0.95 * len(durations)) - 1],
    }


def _phases_ms(chosen: Sample) -> dict[str, float | None]:
    """Of steps without buckets and spans: ``backward`` has the exposed communication in it.

    Of as many as would be looked at in detail; empty if their phases were not recorded either.
    """
    return _mean_phases_ms(_records(chosen))


def _phases_of_rank(
    chosen: Sample, rank: int, totals: RankTotals, reasons: Mapping[str, str]
) -> dict[str, float | None]:
    if totals.steps:
        known: Mapping[str, float | None] = {
            name: totals.parts[name] / totals.steps / MS for name in PHASES
        }
    else:
        known = _mean_phases_ms([chosen.ranks[rank].steps[step] for step in _spread(chosen)])
    return {name: known[name] or (None if name in reasons else 0.0) for name in PHASES if known}


def _mean_phases_ms(records: Sequence[StepRecord]) -> dict[str, float | None]:
    if not any(record.phases for record in records):
        return {}
    sums = dict.fromkeys(PHASES, 0)
    for record in records:
        for phase in record.phases:
            if phase.name in sums:
                sums[phase.name] += phase.end - phase.begin
    sums["other"] = sum(each.duration for each in records) - sum(sums.values())
    return {name: total / len(records) / MS for name, total in sums.items()}


def _series_of_durations(chosen: Sample) -> Series:
    return Series(chosen.steps, chosen.durations_ms(), {}, {}, [None] * len(chosen.steps))


def _ranks(
    chosen: Sample, found: Findings, reasons: Mapping[str, str], *, missing: bool
) -> list[RankSummary]:
    def waiting(nanoseconds: float) -> float | None:
        return None if not nanoseconds and "wait" in reasons else nanoseconds

    summaries = []
    steps_of_parts = chosen.detailed or chosen.steps
    for rank, of_rank in chosen.ranks.items():
        totals = found.ranks[rank]
        steps = max(totals.steps, 1) * MS
        uncertainty = uncertainty_of(of_rank, steps_of_parts)
        caused = sum(each.waited_for[rank] for each in found.ranks.values())
        summaries.append(
            RankSummary(
                rank,
                of_rank.about.host,
                step_ms=mean([of_rank.head(step).duration / MS for step in steps_of_parts]),
                exposed_ms=None if "exposed_ms" in reasons else totals.exposed / steps,
                wait_ms=waiting(totals.waited / steps),
                caused_ms=waiting(caused / steps),
                clock_uncertainty_ms=None if uncertainty is None else uncertainty / MS,
                # With ranks missing it is not known what of the time was waiting for them.
                intra_gbps=None if missing else gbps(totals.intra, totals.intra_moving),
                inter_gbps=None if missing else gbps(totals.inter, totals.inter_moving),
                phases_ms=_phases_of_rank(chosen, rank, totals, reasons),
            )
        )
    return summaries


def _straggler(
    run: Run, found: Findings, uneven: Sequence[Uneven], reasons: dict[str, str]
) -> int | None:
    most = found.waits.most()
    waiting = found.waits.total.total()
    duration = sum(each.duration for each in found.ranks.values())
    if most is None:
        reasons["straggler"] = reasons.get("wait") or _why_nothing(run, "no rank waited")
    elif waiting < _LEAST_WAITING * duration:
        reasons["straggler"] = f"waiting is {waiting / duration:.1%} of the step"
    elif because := _why_not_last(run, found, found.waits, most):
        reasons["straggler"] = f"no rank is clearly the last: {because}"
    elif _waits_elsewhere(found, most, uneven):
        reasons["straggler"] = "ranks are uneven outside of exchanges too, and by more"
    else:
        return most
    return None


def _exposed_straggler(run: Run, found: Findings, uneven: Sequence[Uneven]) -> int | None:
    most = found.exposed_waits.most()
    if most is None or _why_not_last(run, found, found.exposed_waits, most):
        return None
    return None if _waits_elsewhere(found, most, uneven) else most


def _waits_elsewhere(found: Findings, rank: int, uneven: Sequence[Uneven]) -> bool:
    """Whether ``rank`` may be late in exchanges only because it has waited before them."""
    return any(not waits_explain(found, rank, each.more_ms) for each in uneven)


def _why_not_last(run: Run, found: Findings, waits: Waits, rank: int) -> str:
    uncertainty = mean_uncertainty(run, found.series.steps)
    return waits.why_not(rank, uncertainty=uncertainty, waiters=max(len(found.ranks) - 1, 1))


def _why_nothing(run: Run, otherwise: str = "no exchange was recorded") -> str:
    return "one rank exchanges nothing" if run.world_size < 2 else otherwise


def _no_bucket(run: Run) -> str:
    return run.unseen or "no bucket of gradients was seen, nor an exchange"


def _why_no_errors(run: Run, chosen: Sample) -> str:
    if run.unseen:
        return run.unseen
    if run.is_stock:
        return "DDP itself exchanges the gradients, without a codec"
    last = [each.steps[step] for each in chosen.ranks.values() for step in chosen.detailed[-1:]]
    if {bucket.codec for step in last for bucket in step.buckets} == {"none"}:
        return "nothing is compressed"
    return "none was sampled"


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
