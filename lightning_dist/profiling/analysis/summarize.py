"""A profiled run in numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
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
    Traffic,
)
from lightning_dist.profiling.analysis.sample import MOST, Sample, sample, spread
from lightning_dist.profiling.analysis.tables import MS, StepTable, mean, step_table
from lightning_dist.profiling.analysis.unavailable import Unavailable, gone, unavailable_of
from lightning_dist.profiling.capture.events import PHASES, LinkRecord, RankRecord, StepRecord
from lightning_dist.profiling.run import Run

_LEAST_WAITING = 0.02
"""Share of the step below which nobody is called a straggler."""


def summarize(run: Run, *, warmup_steps: int = 2) -> Summary:
    """The summary of a run; ``unavailable`` and ``notes`` say what is missing, and why.

    Args:
        warmup_steps: first steps to leave out: DDP builds its buckets anew after the first.

    Raises:
        ValueError: ``warmup_steps`` is negative.
    """
    chosen = sample(run, warmup_steps=warmup_steps)
    table = step_table(run, chosen.detailed)
    # Phases are known of steps that were only timed, too.
    timed = () if chosen.detailed else spread(chosen.steps, MOST)
    peak = _link_gbps(run)
    unavailable = unavailable_of(run, chosen, table, has_link=peak is not None)
    per_step = _per_step(chosen, table, unavailable)
    breakdown_ms = _breakdown_ms(chosen, table, per_step, unavailable, timed)
    phase_skew = find_phase_skew(table)
    uncertainty = mean_uncertainty(run, table.steps)
    (last, why_none), (exposed_last, _) = (
        straggler(table, column, phase_skew=phase_skew, uncertainty=uncertainty, least=least)
        for column, least in (("late", _LEAST_WAITING), ("exposed_late", 0.0))
    )
    if last is None:
        alone = Unavailable.ALONE if run.world_size < 2 else Unavailable.NO_WAITING
        unavailable["straggler"] = why_none or unavailable.get("exposed_wait") or alone
    heads = [each.head(step) for each in chosen.ranks.values() for step in chosen.steps]
    duration = sum(each.duration for each in heads)
    exchange, is_unknown = table.total("exchange"), "exposed_ms" in unavailable
    summary = Summary(
        headline="",
        run=_about(run),
        steps=len(chosen.steps),
        warmup_steps=chosen.warmup_steps,
        step_ms=_step_ms(chosen),
        breakdown_ms=breakdown_ms,
        exposed_ms=None if is_unknown else sum(breakdown_ms[name] or 0.0 for name in EXPOSED),
        hidden_ms=None if is_unknown else table.mean_ms("hidden"),
        overlap_fraction=table.total("hidden") / exchange if exchange else None,
        traffic=_traffic(table, unavailable, peak),
        ranks=_ranks(run, chosen, table, unavailable, timed),
        buckets=table.bucket_summaries(unavailable),
        straggler=last,
        detailed_steps=len(chosen.detailed or timed) if breakdown_ms else 0,
        exposed_straggler=exposed_last,
        profiler_overhead=sum(each.overhead for each in heads) / duration if duration else None,
        per_step=per_step,
        errors=[{"rank": r, **asdict(each)} for r, of in run.ranks.items() for each in of.errors],
        links=[{"rank": r, **asdict(each)} for r, of in run.ranks.items() for each in of.links],
        unavailable=unavailable,
        phase_skew=phase_skew,
    )
    return replace(
        summary,
        headline=headline(summary, of_steps=chosen.cut),
        notes=notes_of(run, chosen, table, summary),
    )


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


def _step_ms(chosen: Sample) -> dict[str, float | None]:
    durations = sorted(chosen.durations_ms())
    if not durations:
        return {"mean": None, "median": None, "p95": None}
    return {
        "mean": mean(durations),
        "median": statistics.median(durations),
        "p95": durations[math.ceil(0.95 * len(durations)) - 1],
    }


def _per_step(chosen: Sample, table: StepTable, unavailable: Mapping[str, str]) -> PerStep:
    """Without parts that are not known, or zero where ``unavailable`` says that they are not."""
    if not chosen.detailed:
        return PerStep(chosen.steps, chosen.durations_ms(), {}, {}, [None] * len(chosen.steps))

    def means(part: str) -> list[float]:
        return [mean(of_ranks) for of_ranks in (table.of(part) / MS).tolist()]

    def is_known(part: str) -> bool:
        is_blind = part in EXPOSED and "breakdown_ms" in unavailable
        return not is_blind and (part not in unavailable or table.total(part) > 0)

    waited, late = table.of("waited") / MS, table.of("late")
    has_waits = "exposed_wait" not in unavailable or waited.any()
    return PerStep(
        chosen.detailed,
        means("duration"),
        {name: means(name) for name in PARTS if is_known(name)},
        dict(zip(table.ranks, waited.T.tolist(), strict=True)) if has_waits else {},
        [table.ranks[int(of_step.argmax())] if of_step.any() else None for of_step in late],
    )


def _breakdown_ms(
    chosen: Sample,
    table: StepTable,
    per_step: PerStep,
    unavailable: Mapping[str, str],
    timed: Sequence[int],
) -> dict[str, float | None]:
    """Without detail of the phases alone; ``backward`` has the exposed communication in it then."""
    if not chosen.detailed:
        phases = _phases_ms(each.steps[step] for each in chosen.ranks.values() for step in timed)
        return {**phases}
    parts = (name for name in PARTS if name not in EXPOSED or "breakdown_ms" not in unavailable)
    return {name: table.mean_ms(name) if name in per_step.breakdown_ms else None for name in parts}


def _phases_ms(records: Iterable[StepRecord]) -> dict[str, float]:
    """Means of the phases, and of what is ``other``; empty if phases were not recorded."""
    sums, duration, count = dict.fromkeys(PHASES, 0), 0, 0
    for record in records:
        duration, count = duration + record.duration, count + 1
        for phase in record.phases:
            sums[phase.name] += phase.end - phase.begin
    if not any(sums.values()):
        return {}
    sums["other"] = duration - sum(sums.values())
    return {name: total / count / MS for name, total in sums.items()}


def _ranks(
    run: Run,
    chosen: Sample,
    table: StepTable,
    unavailable: Mapping[str, str],
    timed: Sequence[int],
) -> list[RankSummary]:
    def known(value: float | None, name: str) -> float | None:
        return None if not value and name in unavailable else value

    steps = chosen.detailed or chosen.steps
    # With ranks missing it is not known what of the time was waiting for them.
    is_whole = not gone(run, chosen.ranks)
    summaries = []
    for row, (rank, of_rank) in enumerate(chosen.ranks.items()):

        def ms(column: str, row: int = row) -> float:
            return float(table.of_ranks(column)[row]) / max(len(table.steps), 1) / MS

        def rate(column: str, row: int = row) -> float | None:
            sent, moving = table.of_ranks(column)[row], table.of_ranks(f"{column}_moving")[row]
            return _gbps(float(sent), float(moving)) if is_whole else None

        uncertainty = uncertainty_of(of_rank, steps)
        phases: Mapping[str, float] = {name: ms(name) for name in PHASES}
        if not table.steps:
            phases = _phases_ms(of_rank.steps[step] for step in timed)
        summaries.append(
            RankSummary(
                rank,
                of_rank.about.host,
                step_ms=mean([of_rank.head(step).duration / MS for step in steps]),
                exposed_ms=None if "exposed_ms" in unavailable else ms("exposed"),
                wait_ms=known(ms("waited"), "exposed_wait"),
                waited_for_ms=known(ms("late"), "exposed_wait"),
                clock_uncertainty_ms=None if uncertainty is None else uncertainty / MS,
                intra_gbps=rate("intra"),
                inter_gbps=rate("inter"),
                phases_ms={name: known(phases[name], name) for name in PHASES if phases},
            )
        )
    return summaries


def _traffic(
    table: StepTable, unavailable: Mapping[str, str], peak: float | None
) -> Traffic | None:
    if "traffic" in unavailable:
        return None
    raw, intra, inter, moving = map(table.total, ("raw", "intra", "inter", "moving"))
    sent, under_way = table.link_uses()
    wire, effective = _gbps(float(sent.sum()), float(under_way.sum())), _gbps(raw, moving)
    if "traffic.wire_gbps" in unavailable:
        wire = effective = None
    cells = table.cells
    means = (raw / cells, (intra + inter) / cells, intra / cells, inter / cells)
    return Traffic(*means, wire, effective, peak)


def _gbps(nbytes: float, nanoseconds: float) -> float | None:
    """Gbit/s; None where nothing was sent or no time went by."""
    return nbytes * 8 / nanoseconds if nbytes > 0 and nanoseconds > 0 else None


def _link_gbps(run: Run) -> float | None:
    """The best of the links between hosts; inside a host only where there is no other."""
    rates = [
        (_crosses(run, each.about, link), rate)
        for each in run.ranks.values()
        for link in each.links
        if (rate := _gbps(link.sent, link.seconds * 1e9)) is not None
    ]
    return max(rates)[1] if rates else None


def _crosses(run: Run, about: RankRecord, link: LinkRecord) -> bool:
    """The link leads to another host."""
    ends = about.groups.get(link.group, ()) if link.peer is None else [link.peer]
    return bool({run.ranks[rank].about.host for rank in ends if rank in run.ranks} - {about.host})
