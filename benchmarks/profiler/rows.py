"""What a profile says beside what is known: the rows of every case of benchmarks/profiler.

Each function has the folder of a case, what every rank knows of it, the rate of the links, and the
arguments of the case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.profiler.link_packets import LinkPackets
from benchmarks.profiler.rank import FIRST
from lightning_dist.profiling.analysis.breakdown import analyse
from lightning_dist.profiling.analysis.intervals import union
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.run import read_run

Row = dict[str, Any]
MS = 1e6
PAYLOAD = 1448 / 1514
"""Of a full frame, which is what the shaper counts: the rest is headers."""
_SPREAD = ("link_gbps", "wire_gbps", "peak_gbps", "of_link", "link_of_payload")


def skew_rows(
    folder: Path, launched: Sequence[list[int]], /, *, codec: str, late_ms: list[float], **_: Any
) -> list[Row]:
    """How far waiting is from the time between the two launches of each step."""
    run = read_run(folder / "run-0")
    misses: dict[float, list[float]] = {planted: [] for planted in sorted(set(late_ms))}
    for step, planted in enumerate(late_ms, start=FIRST):
        first, _second = analyse(run, step)
        known = (launched[1][step] - launched[0][step]) / MS
        misses[planted].append(first.waited_for.get(1, 0) / MS - max(known, 0.0))
    return [
        {"kind": "skew", "codec": codec, "planted_ms": planted, **deviations(found)}
        for planted, found in misses.items()
    ]


def codec_rows(
    folder: Path, known_ms: Sequence[Sequence[float]], /, *, planted_ms: float, **_: Any
) -> list[Row]:
    """How far the spans of the encodings of a step are from what was timed."""
    run = read_run(folder / "run-0")
    misses = []
    for rank, of_rank in run.ranks.items():
        for step, known in enumerate(known_ms[rank]):
            spans = [each for each in of_rank.steps[step].spans if each.phase == "encode"]
            misses.append(sum(each.end - each.begin for each in spans) / MS - known)
    known = median(each for of_rank in known_ms for each in of_rank)
    return [{"kind": "codec", "planted_ms": planted_ms, "known_ms": known, **deviations(misses)}]


def deviations(misses: Sequence[float]) -> Row:
    """Median and worst of them, in milliseconds, with the sign of the worst."""
    return {
        "count": len(misses),
        "median_ms": median(map(abs, misses)),
        "bias_ms": median(misses),
        "worst_ms": max(misses, key=abs),
    }


def wire_rows(
    folder: Path, packets: Sequence[LinkPackets], /, *, codec: str, link_mbit: float, **_: Any
) -> list[Row]:
    """The rate that the summary says, beside what the links have carried in just that time.

    packets: of the host of every rank.
    """
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
            for since, until in union(exchange.moving for exchange in each.exchanges):
                carried += packets[each.rank].between(begin + since, begin + until)
                lasted += until - since
    row: Row = {
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
    row["of_link"] = row["wire_gbps"] / row["link_gbps"]
    for share, name in (("of", "wire"), ("link_of", "link"), ("peak_of", "peak")):
        row[f"{share}_payload"] = row[f"{name}_gbps"] / row["payload_gbps"]
    return [row]


def medians_of(runs: Sequence[Row]) -> list[Row]:
    """One row of all runs with the same setting, in the order of the first: medians of each figure,
    with the lowest and the highest of rates and of what they are compared with."""
    settings: dict[tuple[Any, ...], list[Row]] = {}
    for each in runs:
        setting = each["link_mbit"], each["congestion_control"], each["codec"]
        settings.setdefault(setting, []).append(each)
    merged = []
    for rows in settings.values():
        values = {name: [each[name] for each in rows] for name in rows[0]}
        row = {name: median(v) if isinstance(v[0], float) else v[0] for name, v in values.items()}
        row |= {f"{name}_low": min(values[name]) for name in _SPREAD}
        row |= {f"{name}_high": max(values[name]) for name in _SPREAD}
        merged.append({**row, "runs": len(rows)})
    return merged


def clock_rows(
    folder: Path, readings: Sequence[Any], /, *, load: str, link_mbit: float | None, **_: Any
) -> list[Row]:
    """How far rank 1's readings are from 0: both hosts have one clock."""
    offsets, uncertainties = np.abs(np.array(readings[1]).T) / 1000
    return [
        {
            "kind": "clocks",
            "load": load,
            "link_mbit": link_mbit,
            "count": len(offsets),
            "median_us": median(offsets),
            "worst_us": max(offsets),
            "uncertainty_us": median(uncertainties),
            "within": float((offsets <= uncertainties).mean()),
        }
    ]


def cost_rows(folder: Path, truth: Sequence[Row], /, *, codec: str, **_: Any) -> list[Row]:
    """Steps with and without, what the profiler itself counts, how many steps it looked at.

    Medians over blocks, and of the differences of neighbours with quartiles.
    """
    run = read_run(folder / "run-0")
    steps = [(number, step) for of in run.ranks.values() for number, step in of.steps.items()]
    row: Row = {"kind": "cost", "codec": codec}
    row["buckets"] = max(len(step.buckets) for number, step in steps if number > 1)
    row["rounds"] = len(truth[0]["without"])
    without, profiled = (
        np.mean([of_rank[name] for of_rank in truth], axis=0).T for name in ("without", "with")
    )
    for name, before, after in zip(("step", "cpu"), without, profiled, strict=True):
        low, middle, high = np.quantile(after - before, (0.25, 0.5, 0.75))
        row[f"{name}_ms"], row[f"{name}_with_ms"] = np.median(before), np.median(after)
        row[f"{name}_more_ms"] = middle
        row[f"{name}_more_low_ms"], row[f"{name}_more_high_ms"] = low, high
    records = [step for number, step in steps if number >= truth[0]["first"]]
    row["overhead"] = sum(e.overhead for e in records) / sum(e.duration for e in records)
    row["detailed"] = sum(each.detailed for each in records) / len(records)
    return [row]


ROWS: dict[str, Callable[..., list[Row]]] = {
    "skew": skew_rows,
    "codec": codec_rows,
    "wire": wire_rows,
    "clocks": clock_rows,
    "cost": cost_rows,
}
"""By kind of case."""
