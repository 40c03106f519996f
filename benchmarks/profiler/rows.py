"""What a profile says beside what is known: one row for every case of benchmarks/profiler."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.profiler.link_packets import LinkPackets
from benchmarks.profiler.rank import FIRST
from lightning_dist.profiling.analysis.breakdown import analyse
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.run import Run, read_run

Row = dict[str, Any]
MS = 1e6
PAYLOAD = 1448 / 1514
"""Of a full frame, which is what the shaper counts: the rest is headers."""
_SPREAD = ("link_gbps", "wire_gbps", "peak_gbps", "of_link", "link_of_payload")


def skew_rows(
    folder: Path, launched: Sequence[Sequence[int]], late_ms: Sequence[float], *, codec: str
) -> list[Row]:
    """How far waiting is from the time between the two launches of each step."""
    run = read_run(folder / "run-0")
    misses: dict[float, list[float]] = {planted: [] for planted in sorted(set(late_ms))}
    for step, planted in enumerate(late_ms, start=FIRST):
        first, _ = analyse(run, step)
        known = (launched[1][step] - launched[0][step]) / MS
        misses[planted].append(first.waited_for.get(1, 0) / MS - max(known, 0.0))
    return [
        {"kind": "skew", "codec": codec, "planted_ms": planted, **deviations(found)}
        for planted, found in misses.items()
    ]


def codec_row(folder: Path, known_ms: Sequence[Sequence[float]], planted_ms: float) -> Row:
    """How far the spans of the encodings of a step are from what was timed."""
    run = read_run(folder / "run-0")
    misses = []
    for rank, of_rank in run.ranks.items():
        for step, known in enumerate(known_ms[rank]):
            spans = [each for each in of_rank.steps[step].spans if each.phase == "encode"]
            misses.append(sum(each.end - each.begin for each in spans) / MS - known)
    known = statistics.median(each for of_rank in known_ms for each in of_rank)
    return {"kind": "codec", "planted_ms": planted_ms, "known_ms": known, **deviations(misses)}


def deviations(misses: Sequence[float]) -> Row:
    """Median and worst of them, in milliseconds, with the sign of the worst."""
    return {
        "count": len(misses),
        "median_ms": statistics.median(map(abs, misses)),
        "bias_ms": statistics.median(misses),
        "worst_ms": max(misses, key=abs),
    }


def wire_row(
    folder: Path, packets: Sequence[LinkPackets], *, codec: str, link_mbit: float | None
) -> Row:
    """The rate that the summary says, beside what the links have carried in just that time.

    packets: of the host of every rank.
    """
    assert link_mbit is not None
    run = read_run(folder / "run-0")
    summary = summarize(run)
    traffic = summary.traffic
    assert traffic is not None
    assert traffic.wire_gbps
    assert traffic.link_gbps
    carried = lasted = 0
    for step in summary.per_step.steps:
        for each in analyse(run, step):
            begin = each.record.begin
            for since, until in each.moving:
                carried += packets[each.rank].between(begin + since, begin + until)
                lasted += until - since
    return {
        "kind": "wire",
        "codec": codec,
        "link_mbit": link_mbit,
        "payload_gbps": link_mbit / 1000 * PAYLOAD,
        "link_gbps": carried * 8 / lasted,
        "wire_gbps": traffic.wire_gbps,
        "peak_gbps": traffic.link_gbps,
        "step_gbps": traffic.wire_bytes * 8 / (summary.step_ms["mean"] * MS),
        "step_ms": summary.step_ms["median"],
        "transfer_ms": summary.breakdown_ms["exposed_transfer"],
        "steps": summary.steps,
    }


def wire_rows(runs: Sequence[Row]) -> list[Row]:
    """One row of all runs with the same setting, in the order of the first: medians of each figure,
    with the lowest and the highest of rates and of what they are compared with."""
    settings: dict[tuple[Any, ...], list[Row]] = {}
    for each in runs:
        setting = each["link_mbit"], each["congestion_control"], each["codec"]
        settings.setdefault(setting, []).append(_with_shares(each))
    return [_median_of(of_setting) for of_setting in settings.values()]


def _with_shares(row: Row) -> Row:
    planted = row["payload_gbps"]
    return {
        **row,
        "of_link": row["wire_gbps"] / row["link_gbps"],
        "of_payload": row["wire_gbps"] / planted,
        "link_of_payload": row["link_gbps"] / planted,
        "peak_of_payload": row["peak_gbps"] / planted,
    }


def _median_of(rows: Sequence[Row]) -> Row:
    merged = {
        name: statistics.median(row[name] for row in rows) if isinstance(value, float) else value
        for name, value in rows[0].items()
    }
    for name in _SPREAD:
        values = [row[name] for row in rows]
        merged[f"{name}_low"], merged[f"{name}_high"] = min(values), max(values)
    return {**merged, "runs": len(rows)}


def clock_row(
    readings: Sequence[Sequence[tuple[int, int]]], *, load: str, link_mbit: float | None
) -> Row:
    """How far rank 1's readings are from 0: both hosts have one clock."""
    offsets = [abs(offset) / 1000 for offset, _ in readings[1]]
    uncertainties = [uncertainty / 1000 for _, uncertainty in readings[1]]
    pairs = zip(offsets, uncertainties, strict=True)
    return {
        "kind": "clocks",
        "load": load,
        "link_mbit": link_mbit,
        "count": len(offsets),
        "median_us": statistics.median(offsets),
        "worst_us": max(offsets),
        "uncertainty_us": statistics.median(uncertainties),
        "within": sum(offset <= uncertainty for offset, uncertainty in pairs) / len(offsets),
    }


def cost_row(folder: Path, truth: Sequence[dict[str, Any]], *, codec: str) -> Row:
    """Steps with and without; what the profiler itself counts; how many steps it looked at."""
    run = read_run(folder / "run-0")
    row: Row = {"kind": "cost", "codec": codec, "buckets": _buckets(run)}
    row |= _compared(_blocks(truth, "without"), _blocks(truth, "with"))
    records = [
        step
        for each in run.ranks.values()
        for number, step in each.steps.items()
        if number >= truth[0]["first"]
    ]
    row["overhead"] = sum(e.overhead for e in records) / sum(e.duration for e in records)
    row["detailed"] = sum(each.detailed for each in records) / len(records)
    return row


def _compared(without: list[tuple[list[float], ...]], others: list[tuple[list[float], ...]]) -> Row:
    """Medians over blocks, and of the differences of neighbours with quartiles."""
    row: Row = {"rounds": len(without)}
    for place, name in enumerate(("step", "cpu")):
        before = [_mean(block, place) for block in without]
        after = [_mean(block, place) for block in others]
        more = [b - a for a, b in zip(before, after, strict=True)]
        row[f"{name}_ms"] = statistics.median(before)
        row[f"{name}_with_ms"] = statistics.median(after)
        row[f"{name}_more_ms"] = statistics.median(more)
        row[f"{name}_more_low_ms"] = np.quantile(more, 0.25)
        row[f"{name}_more_high_ms"] = np.quantile(more, 0.75)
    return row


def _blocks(truth: Sequence[dict[str, Any]], name: str) -> list[tuple[list[float], ...]]:
    """Of each round what all ranks have measured."""
    return list(zip(*(of_rank[name] for of_rank in truth), strict=True))


def _mean(block: Sequence[Sequence[float]], place: int) -> float:
    return statistics.mean(of_rank[place] for of_rank in block)


def _buckets(run: Run) -> int:
    """As DDP has built them."""
    return max(
        len(step.buckets)
        for each in run.ranks.values()
        for number, step in each.steps.items()
        if number > 1 or len(each.steps) < 3
    )


Row = Mapping[str, Any]
