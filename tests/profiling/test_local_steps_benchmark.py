"""The benchmark of local steps: its rows say what its turns and a profile say."""

from __future__ import annotations

from typing import Any

import pytest
from whatif_runs import COSTS, DDP

from benchmarks.harness.rows import RowName
from benchmarks.profiler.whatif import Measured, local_rows
from benchmarks.step_time.tables import local_steps
from lightning_dist.profiling.whatif.observe import observe

LOCAL = "streaming@16:fragments=2,overlap_steps=1/none"
SCHEDULE = {"sync_every": 16, "fragments": 2, "overlap_steps": 1}
META = {
    "date": "2026-11-23T22:20:00+00:00",
    "versions": {"torch": "2.13.0"},
    "machine": {"cpu": "a CPU", "cores": 2},
    "arguments": {"base": 200.0},
}


def turn(row: str, step_s: float) -> dict[str, Any]:
    return {"row": row, "step_s": step_s, "steps": 16, "wire_bytes": 1e6}


def test_rows_have_the_share_of_the_throughput_and_the_ratio_to_the_prediction() -> None:
    ends = [
        {"row": "no-comm", "identical": False, "local": {}},
        {"row": LOCAL, "identical": True, "local": SCHEDULE},
    ]
    found = Measured(
        profiles={("ddp", 200.0): observe(DDP.run())},
        costs=dict(COSTS),
        results={
            200.0: [turn("no-comm", 0.06), *(turn(LOCAL, s) for s in (0.08, 0.07, 0.3)), *ends],
            100.0: [turn("no-comm", 0.06), turn(LOCAL, 0.12), *ends],
        },
    )
    rows = local_rows(found, base=200.0)
    of_link = {row["link_mbit"]: row for row in rows if row["row"] == LOCAL}
    assert of_link[200.0]["step_ms"] == pytest.approx(80)
    assert of_link[200.0]["share"] == pytest.approx(0.75)
    assert of_link[200.0]["steps"] == 48
    # By hand: 67 ms of computing; a fragment takes 80 ms, or 160 at half the rate, less one step.
    assert of_link[200.0]["predicted_ms"] == pytest.approx(67 + (80 - 67) / 8)
    assert of_link[100.0]["predicted_ms"] == pytest.approx(67 + (160 - 67) / 8)
    assert of_link[100.0]["ratio"] == pytest.approx(120 / (67 + 93 / 8))
    assert [row["replicas_identical"] for row in rows] == [None, True] * 2
    table = local_steps({"meta": META, "rows": rows})
    assert table is not None
    assert "| 120 ms / 50 % / 1.53 | 80 ms / 75 % / 1.17 |" in table
    assert "| 60 ms / 100 % / n/a |" in table


def test_a_row_says_its_codec() -> None:
    for row, codec in {
        "delay/int8": "int8",
        "diloco@16:outer_lr=1/int4": "int4",
        "streaming@16": "int8",
        "ddp*1.4": "ddp",
        "local_sgd@8/int4*2": "int4",
        "onebit-adam:sign": "sign",
        "int4-noef": "int4",
        "sign-warm": "sign",
        "hierarchical/bf16+int8": "int8",
        "fsdp/int8@4": "int8",
        "fsdp/all-ranks-int8": "qsgd:bits=8",
        "sparseloco@16": "topk:ratio=0.015625,values=int2,decay=0.95",
    }.items():
        assert RowName.parse(row).codec == codec
    assert [RowName.parse(row).rate for row in ("ddp", "ddp*1.4")] == [1.0, 1.4]
