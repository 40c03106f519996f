"""A profiled run in numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec.structs import asdict

from lightning_dist.profiling.analysis.breakdown import timeline
from lightning_dist.profiling.analysis.imbalance import find_phase_skew, straggler
from lightning_dist.profiling.analysis.notes import headline, notes_of, unavailable_of
from lightning_dist.profiling.analysis.parts import (
    EXPOSED,
    PARTS,
    PerStep,
    RankSummary,
    Summary,
    Timeline,
    Traffic,
)
from lightning_dist.profiling.analysis.tables import MS, Sample, StepTable, mean, sample, step_table
from lightning_dist.profiling.capture.events import PHASES, Record
from lightning_dist.profiling.run import Run


def summarize(run: Run, *, warmup_steps: int = 2) -> Summary:
    """The summary of a run; ``unavailable`` and ``notes`` say what is missing, and why.

    Args:
        warmup_steps: first steps to leave out: DDP builds its buckets anew after the first.

    Raises:
        ValueError: ``warmup_steps`` is negative.
    """
    chosen = sample(run, warmup_steps=warmup_steps)
    table = step_table(run, chosen.detailed)
    peak = _link_gbps(run)
    unavailable = unavailable_of(run, chosen, table, has_link=peak is not None)
    breakdown_ms = _breakdown_ms(table, unavailable)
    phase_skew = find_phase_skew(table)
    last, why_none = straggler(table, phase_skew)
    if last is None:
        alone = "one rank exchanges nothing" if run.world_size < 2 else "no rank waited"
        unavailable["straggler"] = why_none or unavailable.get("exposed_wait") or alone
    heads = [rank_run.head(step) for rank_run in chosen.ranks.values() for step in chosen.steps]
    duration = sum(head.duration for head in heads)
    exchange, is_unknown = table.total("exchange"), "exposed_ms" in unavailable
    summary = Summary(
        headline="",
        run=_run_info(run),
        steps=len(chosen.steps),
        warmup_steps=chosen.warmup_steps,
        step_ms=_step_ms(chosen),
        breakdown_ms=breakdown_ms,
        exposed_ms=None if is_unknown else sum(breakdown_ms[name] or 0.0 for name in EXPOSED),
        hidden_ms=None if is_unknown else table.mean_ms("hidden"),
        overlap_fraction=table.total("hidden") / exchange if exchange else None,
        traffic=_traffic(table, unavailable, peak),
        ranks=_ranks(run, chosen, table, unavailable),
        buckets=table.bucket_summaries(unavailable),
        straggler=last,
        detailed_steps=len(chosen.detailed),
        profiler_overhead=sum(head.overhead for head in heads) / duration if duration else None,
        per_step=_per_step(chosen, table, breakdown_ms, unavailable),
        errors=_with_ranks({rank: rank_run.errors for rank, rank_run in run.ranks.items()}),
        links=_with_ranks({rank: rank_run.links for rank, rank_run in run.ranks.items()}),
        unavailable=unavailable,
        phase_skew=phase_skew,
        exposed_fsdp_ms=None if is_unknown else table.mean_ms("exposed_fsdp"),
        generations=[
            {name: getattr(generation, name) for name in ("number", "step", "reason")}
            for generation in run.generations
        ],
    )
    return replace(
        summary,
        headline=headline(summary, cut=chosen.cut),
        notes=notes_of(run, chosen, table, summary),
    )


def _with_ranks(records: Mapping[int, Sequence[Record]]) -> list[dict[str, Any]]:
    """Records of every rank, with the rank."""
    return [{"rank": rank, **asdict(record)} for rank, lines in records.items() for record in lines]


def pick_steps(run: Run, summary: Summary) -> list[Timeline]:
    """The steps whose durations are nearest to the median and to the p95, and the slowest."""
    steps, step_ms = summary.per_step.steps, summary.per_step.step_ms
    picked: dict[int, str] = {}
    wanted = {**summary.step_ms, "slowest": max(step_ms, default=None)}
    for name in ("median", "p95", "slowest"):
        duration = wanted[name]
        if duration is not None and step_ms:
            distances = [abs(step - duration) for step in step_ms]
            picked.setdefault(steps[distances.index(min(distances))], f"{name} step")
    return [timeline(run, step, label) for step, label in picked.items()]


def _run_info(run: Run) -> dict[str, Any]:
    if not run.ranks:
        return {}
    first, nodes = run.ranks[min(run.ranks)].metadata, run.nodes
    return {
        **{name: getattr(first, name) for name in ("codec", "backend", "device")},
        "world_size": run.world_size,
        "nodes": [nodes.get(rank) for rank in range(run.world_size)],
        "script": first.script,
        "started": first.started,
        "versions": dict(first.versions),
    }


def _step_ms(chosen: Sample) -> dict[str, float | None]:
    durations = chosen.durations_ms()
    if not durations:
        return {"mean": None, "median": None, "p95": None}
    return {
        "mean": mean(durations),
        "median": statistics.median(durations),
        "p95": float(np.quantile(durations, 0.95, method="inverted_cdf")),
    }


def _breakdown_ms(table: StepTable, unavailable: Mapping[str, str]) -> dict[str, float | None]:
    """Means of the parts; None: a zero that is not known to be one. Empty without detail."""
    seen = [name for name in PARTS if name not in EXPOSED or "breakdown_ms" not in unavailable]
    return {
        name: _known(table.mean_ms(name), name, unavailable)
        for name in (seen if table.steps else ())
    }


def _per_step(
    chosen: Sample,
    table: StepTable,
    breakdown_ms: Mapping[str, float | None],
    unavailable: Mapping[str, str],
) -> PerStep:
    if not table.steps:
        return PerStep(chosen.steps, chosen.durations_ms(), {}, {})
    known = ("duration", *(name for name, value in breakdown_ms.items() if value is not None))
    means = {name: (table.of(name).mean(axis=1) / MS).tolist() for name in known}
    waited = table.of("waited") / MS
    has_waits = "exposed_wait" not in unavailable or waited.any()
    return PerStep(
        table.steps,
        means.pop("duration"),
        means,
        dict(zip(table.ranks, waited.T.tolist(), strict=True)) if has_waits else {},
        (table.of("intra", "inter").mean(axis=1) / MS).tolist(),
    )


def _ranks(
    run: Run, chosen: Sample, table: StepTable, unavailable: Mapping[str, str]
) -> list[RankSummary]:
    names = (*PHASES, "exposed", "waited", "late", "intra", "intra_moving", "inter", "inter_moving")
    steps = chosen.detailed or chosen.steps
    per_step = max(len(table.steps), 1) * MS
    means = {name: (table.of(name).sum(axis=0) / per_step).tolist() for name in names}
    uncertainties = table.of("uncertainty").max(axis=0, initial=0).tolist()
    # With ranks missing it is not known what of the time was waiting for them.
    is_whole = not run.beside(chosen.ranks)
    summaries = []
    for row, (rank, of_rank) in enumerate(chosen.ranks.items()):
        figures = {name: values[row] for name, values in means.items()}
        intra = _gbps(figures["intra"], figures["intra_moving"])
        inter = _gbps(figures["inter"], figures["inter_moving"])
        summaries.append(
            RankSummary(
                rank,
                of_rank.metadata.node,
                mean([of_rank.head(step).duration for step in steps]) / MS,
                None if "exposed_ms" in unavailable else figures["exposed"],
                _known(figures["waited"], "exposed_wait", unavailable),
                _known(figures["late"], "exposed_wait", unavailable),
                uncertainties[row] / MS if table.steps and of_rank.clocks else None,
                intra if is_whole else None,
                inter if is_whole else None,
                {name: _known(figures[name], name, unavailable) for name in PHASES if table.steps},
            )
        )
    return summaries


def _known(value: float, name: str, unavailable: Mapping[str, str]) -> float | None:
    """None instead of a zero of what is not known."""
    return None if not value and name in unavailable else value


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
    """The best of the links between nodes; inside a node only where there is no other."""
    nodes, rates = run.nodes, []
    for rank_run in run.ranks.values():
        for link in rank_run.links:
            group = rank_run.metadata.groups.get(link.group, ())
            ends = group if link.peer is None else [link.peer]
            crosses = {nodes[rank] for rank in ends if rank in nodes} - {rank_run.metadata.node}
            if (rate := _gbps(link.sent, link.seconds * 1e9)) is not None:
                rates.append((bool(crosses), rate))
    return max(rates)[1] if rates else None
