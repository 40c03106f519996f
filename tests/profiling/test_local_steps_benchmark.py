"""Benchmarks of local steps and of shards: their rows say what their turns and profiles say."""

from __future__ import annotations

from typing import Any

import pytest
from planted import replace
from whatif_runs import ALLREDUCE, COSTS, DDP, GATHER, SCATTER, all_ranks

from benchmarks.harness.rows import RowName
from benchmarks.profiler.tables import WHATIF_FSDP
from benchmarks.profiler.whatif import FSDP_BASES, Measured, fsdp_rows, local_rows
from benchmarks.step_time.tables import LOCAL_STEPS
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
    table = LOCAL_STEPS({"meta": META, "rows": rows})
    assert table is not None
    assert "| 120 ms / 50 % / 1.53 | 80 ms / 75 % / 1.17 |" in table
    assert "| 60 ms / 100 % / n/a |" in table


def test_shards_are_compared_with_the_profile_of_their_sharding() -> None:
    profile, ours = observe(all_ranks()), "fsdp/all-ranks-int8"  # gradients in qsgd
    costs = {**COSTS, "qsgd:bits=8": replace(COSTS["int8"], encode=0.0, decode=0.0, store=0.0)}
    found = Measured(
        profiles={(FSDP_BASES[1], 200.0): profile},
        costs=costs,
        results={
            200.0: [turn(ours, 0.3), turn(ours, 0.1), turn(FSDP_BASES[1], 0.5)],
            100.0: [turn("fsdp/all-ranks", 1.0)],
        },
    )
    rows, meta = fsdp_rows(found, base=200.0)
    by_row = {(row["setting"], row["link_mbit"]): row for row in rows}
    # By hand: 55 ms of computing, and 12 of parameters in the codec of the profile.
    step_ms = 55 + 12 + (4 * GATHER + 2 * SCATTER) / 50_000
    first = by_row["all-ranks-int8", 200.0]
    assert first["measured_ms"] == pytest.approx(200)
    assert first["predicted_ms"] == pytest.approx(step_ms)
    assert first["relative_error"] == pytest.approx(step_ms / 200 - 1)
    assert first["wire_mb"] == 1.0
    assert first["predicted_mb"] == pytest.approx((4 * GATHER + 2 * SCATTER) / 1e6)
    native = by_row["all-ranks", 100.0]["predicted_ms"]
    assert native == pytest.approx(55 + 4 * (4 * GATHER + 2 * ALLREDUCE) / 25_000)
    assert [row["is_base"] for row in rows] == [False, True, False]
    assert meta["errors"]["rows"] == 2
    arguments = {"layout": "2x2", "model": "linear"}
    table = WHATIF_FSDP({"meta": {**META, **meta, "arguments": arguments}, "rows": rows})
    assert table is not None
    assert "| `all-ranks-none` | n/a | 500 ms (the profile) |" in table


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
        "fsdp/all-ranks-none": "none",
        "sparseloco@16": "topk:ratio=0.015625,values=int2,decay=0.95",
    }.items():
        assert RowName.parse(row).codec == codec
    assert [RowName.parse(row).rate for row in ("ddp", "ddp*1.4")] == [1.0, 1.4]
    of_parameters = [RowName.parse(f"fsdp/all-ranks{end}").parameters for end in ("", "-int8")]
    assert of_parameters == [None, "int8"]
