"""The cases of benchmarks/profiling.py that take ranks, and the row of each."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.profiling_rows import (
    clock_row,
    codec_row,
    cost_row,
    skew_rows,
    wire_row,
)
from benchmarks.testbed import Testbed

Row = dict[str, Any]

LINKS_MBIT = (50.0, 200.0, 1000.0)
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
    """

    name: str
    arguments: dict[str, Any]
    rows: Callable[[Path, list[Any], float | None], list[Row]]


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
            lambda folder, _, link, codec=codec: [wire_row(folder, codec=codec, link_mbit=link)],
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
    "wire": wire_cases,
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
        testbed.launch(
            [sys.executable, "-m", "benchmarks.profiling_rank", json.dumps(listed)],
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
