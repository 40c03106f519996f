"""Is what CommProfiler says true, and what does it cost?

Two ranks on two hosts of harness/testbed.py. Planted are skew, time of a codec and rates of
links, beside which stands what the interfaces have sent; the clocks of the hosts are compared,
which are one; then the same step with and without the profiler, block by block.

    python -m benchmarks.profiler --json FILE [--only KIND] [--renew] [--rounds N] [--runs N]
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.results import parser_of, recording
from benchmarks.harness.testbed import Testbed
from benchmarks.profiler import rank
from benchmarks.profiler.link_packets import LinkPackets, noted, packets_of
from benchmarks.profiler.tables import CLOCKS, COST, TRUTH, WIRE
from lightning_dist.profiling.analysis.breakdown import analyse
from lightning_dist.profiling.analysis.parts import union
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.run import read_run

Row = dict[str, Any]
Case = Mapping[str, Any]
"""Arguments of the function in `rank.py` that has the name of the kind."""

CODECS = ("ddp", "int8")
CASES: dict[str, Sequence[Case]] = {
    "skew": [{"codec": codec, "late_ms": [50.0, 100.0] * 20} for codec in CODECS],
    "codec": [{"planted_ms": planted, "steps": 20} for planted in (2.0, 10.0)],
    "wire": [{"codec": "ddp", "steps": 7}, {"codec": "int8", "steps": 12}],
    "clocks": [
        {"load": load, "readings": readings}
        for load, readings in (("idle", 100), ("both ways", 20), ("one way", 20))
    ],
    "cost": [
        {"codec": codec, "buckets": buckets, "step_ms": step_ms}
        for codec, steps_ms in (("ddp", (20.0, 50.0, 200.0)), ("int8", (50.0, 200.0)))
        for buckets, step_ms in itertools.product((1, 8, 40), steps_ms)
    ],
}
_LINKS = ((50.0, None), (50.0, "cubic"), (200.0, None), (1000.0, None))
"""Mbit/s and TCP's congestion control, None: the machine's own. At 50 Mbit/s steps are long, and
bbr does not fill the link all the time; cubic does."""
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_LIMIT_S = 400.0
MS = 1e6
PAYLOAD = 1448 / 1514
"""Of a full frame, which is what the shaper counts: the rest is headers."""
_SPREAD = ("link_gbps", "wire_gbps", "peak_gbps", "of_link", "link_of_payload")


def main() -> None:
    parser = parser_of(__doc__, renews=True)
    add = parser.add_argument
    add("--only", dest="kinds", action="append", choices=CASES, help="repeatable")
    add("--rounds", type=int, default=6, help="blocks with and without, of cost")
    add("--runs", type=int, default=3, help="of wire")
    given = parser.parse_args()
    given.kinds = given.kinds or [*CASES]
    with recording(given) as record:
        for kind in given.kinds:
            for rows in _measured(kind, given.rounds, given.runs):
                record.add(rows, TRUTH, WIRE, CLOCKS, COST)


def _measured(kind: str, rounds: int, runs: int) -> Iterator[list[Row]]:
    """The rows of a kind, in one group or several."""
    cases = CASES[kind]
    if kind == "wire":
        yield medians_of([row for _ in range(runs) for row in _wire_runs()])
    elif kind == "cost":
        for codec in CODECS:
            of_codec = [{**case, "rounds": rounds} for case in cases if case["codec"] == codec]
            with Testbed(hosts=2, link_mbit=None) as testbed:
                yield run_cases(testbed, kind, of_codec)
    else:
        with Testbed(hosts=2, link_mbit=200.0 if kind == "clocks" else None) as testbed:
            yield run_cases(testbed, kind, cases)


def _wire_runs() -> Iterator[Row]:
    """Each link once: what disturbs the machine for a while disturbs all settings."""
    own = _CONGESTION_CONTROL.read_text().strip()
    for link, control in dict.fromkeys((link, control or own) for link, control in _LINKS):
        with Testbed(hosts=2, link_mbit=link, congestion_control=control) as testbed:
            for row in run_cases(testbed, "wire", CASES["wire"]):
                yield {"congestion_control": control, **row}


def run_cases(testbed: Testbed, kind: str, cases: Sequence[Case]) -> list[Row]:
    """All in the same processes, one on each host; of wire the packets are noted meanwhile."""
    with tempfile.TemporaryDirectory() as directory:
        parent = Path(directory)
        with noted(testbed, parent) if kind == "wire" else nullcontext():
            of_ranks = testbed.run(
                rank.run, timeout_s=_LIMIT_S, kind=kind, folder=directory, cases=cases
            )
        truths: list[Any] = list(zip(*of_ranks, strict=True))
        if kind == "wire":
            truths = [packets_of(parent, hosts=testbed.hosts)] * len(cases)
        return [
            row
            for number, (truth, case) in enumerate(zip(truths, cases, strict=True))
            for row in ROWS[kind](parent / str(number), truth, link_mbit=testbed.link_mbit, **case)
        ]


def skew_rows(
    folder: Path, launched: Sequence[list[int]], /, *, codec: str, late_ms: list[float], **_: Any
) -> list[Row]:
    """How far waiting is from the time between the two launches of each step."""
    run = read_run(folder / "run-0")
    misses: dict[float, list[float]] = {planted: [] for planted in sorted(set(late_ms))}
    for step, planted in enumerate(late_ms, start=rank.FIRST):
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
    for number, of_rank in run.ranks.items():
        for step, known in enumerate(known_ms[number]):
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
"""By kind of case; each has the folder of a case, what every rank knows of it, the rate of the
links, and the arguments of the case."""


if __name__ == "__main__":
    main()
