"""Is what CommProfiler says true, and what does it cost?

Two ranks on two hosts of harness/testbed.py. Planted are skew, time of a codec and rates of
links, beside which stands what the interfaces have sent; the clocks of the hosts are compared,
which are one; then the same step with and without the profiler, block by block, and how long its
files take to be made.

    python -m benchmarks.profiler --json FILE [--only KIND] [--renew] [--rounds N] [--runs N]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.docs_tables import print_tables
from benchmarks.harness import network
from benchmarks.harness.launch import RankFailed
from benchmarks.harness.results import collect_meta, renewed, write_json
from benchmarks.harness.testbed import Testbed, TestbedUnavailable
from benchmarks.profiler.link_packets import noted, packets_of
from benchmarks.profiler.outputs import outputs
from benchmarks.profiler.rows import (
    clock_row,
    codec_row,
    cost_row,
    skew_rows,
    wire_row,
    wire_rows,
)

Row = dict[str, Any]
KINDS = ("skew", "codec", "wire", "clocks", "outputs", "cost")
_SIZES = ((2, 100), (2, 5000), (8, 100), (8, 5000))
"""Ranks and steps of profiles whose files are made."""
_LINKS = ((50.0, None), (50.0, "cubic"), (200.0, None), (1000.0, None))
"""Mbit/s and TCP's congestion control, None: the machine's own. At 50 Mbit/s steps are long, and
bbr does not fill the link all the time; cubic does."""
_SECTIONS = [f"profile-{name}" for name in ("truth", "wire", "clocks", "cost", "outputs")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", action="append", choices=KINDS, help="repeatable")
    parser.add_argument("--renew", action="store_true", help="keep what FILE has of other kinds")
    parser.add_argument("--rounds", type=int, default=6, help="blocks with and without, of cost")
    parser.add_argument("--runs", type=int, default=3, help="of wire")
    given = parser.parse_args()
    if given.renew and not (given.json and given.json.exists()):
        parser.error("--renew needs the results to renew: --json with a file that exists")
    kinds = given.only or [*KINDS]
    arguments = {"kinds": kinds, "rounds": given.rounds, "runs": given.runs}
    meta = collect_meta(seed=0, arguments=arguments)
    kept = json.loads(given.json.read_text()) if given.renew else None
    rows: list[Row] = []
    try:
        for found in _measured(kinds, rounds=given.rounds, runs=given.runs):
            print_tables(meta, found, *_SECTIONS)
            rows += found
            if given.json:  # after each, so that a failure of a later one loses nothing
                result = {"meta": meta, "rows": rows}
                write_json(given.json, **(renewed(kept, result) if kept else result))
    except KeyboardInterrupt:
        sys.exit(130)
    except (TestbedUnavailable, RankFailed) as error:
        sys.exit(f"profiler: {error}")


def _measured(kinds: list[str], *, rounds: int, runs: int) -> Iterator[list[Row]]:
    """The rows of one kind after the other."""
    for kind in kinds:
        if kind == "outputs":
            with tempfile.TemporaryDirectory() as folder:
                yield [
                    outputs(Path(folder) / f"{r}-{s}", ranks=r, steps=s, seed=0) for r, s in _SIZES
                ]
        elif kind == "cost":
            for codec in CODECS:
                with Testbed(hosts=2, link_mbit=None) as testbed:
                    yield run_cases(testbed, cost_cases(codec, rounds=rounds))
        elif kind == "wire":
            yield wire_rows([row for _ in range(runs) for row in _wire_runs()])
        else:
            with Testbed(hosts=2, link_mbit=200.0 if kind == "clocks" else None) as testbed:
                yield run_cases(testbed, TRUTHS[kind]())


def _wire_runs() -> Iterator[Row]:
    """Each link once: what disturbs the machine for a while disturbs all settings."""
    own = network.own_congestion_control()
    for link, control in dict.fromkeys((link, control or own) for link, control in _LINKS):
        with Testbed(hosts=2, link_mbit=link, congestion_control=control) as testbed:
            for row in run_cases(testbed, wire_cases()):
                yield {"congestion_control": control, **row}


Row = dict[str, Any]

CODECS = ("ddp", "int8")
_LATE_MS = (50.0, 100.0)
_LATE_STEPS = 20
_STEPS_MS = {"ddp": (20.0, 50.0, 200.0), "int8": (50.0, 200.0)}
_BUCKETS = (1, 8, 40)
_BLOCK_S = 1.0
_LIMIT_S = 400.0


@dataclass(frozen=True)
class Case:
    """What ranks do.

    Args:
        rows: of the folder, what every rank knows, and the rate of the links.
        packets: whether those of the links are noted meanwhile, in the folder above.
    """

    name: str
    arguments: dict[str, Any]
    rows: Callable[[Path, list[Any], float | None], list[Row]]
    packets: bool = False


def skew_cases() -> list[Case]:
    """One rank is late in every step, by 50 and 100 ms in turn."""
    late = [*_LATE_MS] * _LATE_STEPS
    return [
        Case(
            "skew",
            {"codec": codec, "late_ms": late},
            lambda folder, truth, _, codec=codec: skew_rows(folder, truth, late, codec=codec),
        )
        for codec in CODECS
    ]


def codec_cases() -> list[Case]:
    """Each of 4 buckets takes longer to encode."""
    return [
        Case(
            "codec",
            {"planted_ms": planted, "steps": 20},
            lambda folder, truth, _, planted=planted: [codec_row(folder, truth, planted)],
        )
        for planted in (2.0, 10.0)
    ]


def wire_cases() -> list[Case]:
    """Steps that are nearly all transfer."""
    return [
        Case(
            "wire",
            {"codec": codec, "steps": steps},
            lambda folder, truth, link, codec=codec: [
                wire_row(
                    folder,
                    packets_of(folder.parent, hosts=len(truth)),
                    codec=codec,
                    link_mbit=link,
                )
            ],
            packets=True,
        )
        for codec, steps in zip(CODECS, (7, 12), strict=True)
    ]


def clock_cases() -> list[Case]:
    """Clocks compared while nothing travels, and while something does."""
    return [
        Case(
            "clocks",
            {"load": load, "readings": readings},
            lambda folder, truth, link, load=load: [clock_row(truth, load=load, link_mbit=link)],
        )
        for load, readings in (("idle", 100), ("both ways", 20), ("one way", 20))
    ]


def cost_cases(codec: str, *, rounds: int) -> list[Case]:
    """Steps of several lengths, in one bucket or many."""
    return [
        Case(
            "cost",
            {
                "codec": codec,
                "buckets": buckets,
                "step_ms": step_ms,
                "rounds": rounds,
                "block_s": _BLOCK_S,
                "budget": 0.01,
            },
            lambda folder, truth, _: [cost_row(folder, truth, codec=codec)],
        )
        for buckets in _BUCKETS
        for step_ms in _STEPS_MS[codec]
    ]


TRUTHS: dict[str, Callable[[], list[Case]]] = {
    "skew": skew_cases,
    "codec": codec_cases,
    "clocks": clock_cases,
}


def run_cases(testbed: Testbed, cases: Sequence[Case]) -> list[Row]:
    """All in the same processes, one on each host."""
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent) / str(number) for number in range(len(cases))]
        for folder in folders:
            folder.mkdir()
        listed = [
            {"case": case.name, "folder": str(folder), "arguments": case.arguments}
            for case, folder in zip(cases, folders, strict=True)
        ]
        watched = any(case.packets for case in cases)
        with noted(testbed, Path(parent)) if watched else nullcontext():
            testbed.launch(
                [sys.executable, "-m", "benchmarks.profiler.rank", json.dumps(listed)],
                timeout_s=_LIMIT_S,
                echo=True,
            )
        rows: list[Row] = []
        for case, folder in zip(cases, folders, strict=True):
            truth = [
                json.loads((folder / f"truth-{rank}.json").read_text())
                for rank in range(testbed.hosts)
            ]
            rows += case.rows(folder, truth, testbed.link_mbit)
        return rows


if __name__ == "__main__":
    main()
