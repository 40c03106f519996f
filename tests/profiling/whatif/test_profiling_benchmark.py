"""Benchmarks of the profiler, of local steps and of shards: their rows say what profiles say."""

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import MS, Planted, coarse, replace, replaced, write
from whatif_runs import ALLREDUCE, COSTS, DDP, GATHER, SCATTER, all_ranks

from benchmarks.docs_tables import SECTIONS
from benchmarks.harness.results import Record, renewed
from benchmarks.harness.rows import RowName
from benchmarks.harness.testbed import Testbed, TestbedUnavailable
from benchmarks.profiler.__main__ import (
    clock_rows,
    codec_rows,
    cost_rows,
    medians_of,
    skew_rows,
    wire_rows,
)
from benchmarks.profiler.link_packets import LinkPackets, noted, packets_of
from benchmarks.profiler.rank import FIRST
from benchmarks.profiler.tables import WHATIF_FSDP
from benchmarks.profiler.whatif import FSDP_BASES, Measured, fsdp_rows, local_rows
from benchmarks.step_time.tables import LOCAL_STEPS
from lightning_dist.profiling.capture.events import LinkRecord
from lightning_dist.profiling.whatif.observe import observe

SENDS = Path(__file__).with_name("send_bytes.py")
META = {
    "date": "2026-11-22T03:00:00+00:00",
    "versions": {"torch": "2.13.0"},
    "machine": {"cpu": "a CPU", "cores": 2, "load_before": 0.5},
}
SHOWN = ("truth", "wire", "clocks", "cost")


def test_skew_is_compared_with_the_launches(tmp_path: Path) -> None:
    planted = Planted(steps=FIRST + 4, late={1: 50}, buckets=1)
    write(tmp_path / "run-0", planted.run().ranks.values())
    # The ranks say 49 and 51 ms in turn, the profile 50.
    launched = [[0] * (FIRST + 4), [0] * FIRST + [49 * MS, 51 * MS] * 2]
    rows = skew_rows(tmp_path, launched, codec="int8", late_ms=[50.0, 100.0] * 2)
    assert [row["planted_ms"] for row in rows] == [50, 100]
    assert [row["bias_ms"] for row in rows] == pytest.approx([1, -1])
    assert [row["count"] for row in rows] == [2, 2]
    assert rows[1]["median_ms"] == pytest.approx(1)


def test_codec_time_is_that_of_the_encodings(tmp_path: Path) -> None:
    run = Planted(steps=3, encode=2, decode=7, buckets=4).run()
    write(tmp_path / "run-0", run.ranks.values())
    known_ms = [[8.0, 8.0, 8.0], [8.0, 8.0, 5.0]]
    (row,) = codec_rows(tmp_path, known_ms, planted_ms=2.0)
    assert (row["median_ms"], row["worst_ms"], row["count"]) == (0, 3, 6)


def a_wire_row(tmp_path: Path, *, link_mbit: float) -> dict[str, Any]:
    """4 MB in 60 ms, from 33 ms on in each step of 100: so says the profile."""
    run = Planted(steps=4).run()
    links = [LinkRecord("flat", sent=100_000_000, seconds=1.0)]
    write(tmp_path / "run-0", replaced(run, 1, links=links).ranks.values())
    # The link of rank 0 has carried a quarter less, and that of rank 1 an eighth; the rest before.
    packets = []
    for rank, inside in ((0, 3_000_000), (1, 3_500_000)):
        times = [
            record.begin + at * MS for record in run.ranks[rank].steps.values() for at in (20, 50)
        ]
        sizes = [4_000_000 - inside, inside] * len(run.ranks[rank].steps)
        packets.append(LinkPackets(np.array(times), np.array(sizes)))
    (row,) = wire_rows(tmp_path, packets, codec="int8", link_mbit=link_mbit)
    return {"congestion_control": "bbr", **row}


def test_a_rate_is_compared_with_the_packets_of_just_that_time(tmp_path: Path) -> None:
    row = a_wire_row(tmp_path, link_mbit=1000.0)
    assert row["wire_gbps"] == pytest.approx(4e6 * 8 / 60e6)
    assert row["link_gbps"] == pytest.approx(3.25e6 * 8 / 60e6)
    assert row["peak_gbps"] == pytest.approx(0.8)
    assert row["of_link"] == pytest.approx(row["wire_gbps"] / row["link_gbps"])
    assert row["link_of_payload"] == pytest.approx(row["link_gbps"] / row["payload_gbps"])
    runs = [
        {**row, "link_gbps": gbps, "of_link": row["wire_gbps"] / gbps} for gbps in (0.5, 0.4, 0.6)
    ]
    other = {**row, "congestion_control": "cubic"}
    (of_bbr, of_cubic) = medians_of([runs[0], other, *runs[1:]])
    assert of_bbr["link_gbps"] == pytest.approx(0.5)
    assert (of_bbr["link_gbps_low"], of_bbr["link_gbps_high"]) == (0.4, 0.6)
    assert of_bbr["of_link"] == pytest.approx(row["wire_gbps"] / 0.5)
    assert (of_bbr["runs"], of_cubic["runs"]) == (3, 1)


def test_packets_count_without_their_headers(tmp_path: Path) -> None:
    # An acknowledgement, and of the last one only a part is written.
    packets = [(30, 1066), (10, 66), (20, 566)]
    content = b"".join(struct.pack("<2q", *each) for each in packets)
    (tmp_path / "host0.packets").write_bytes(content + b"\0" * 9)
    (link,) = packets_of(tmp_path, hosts=1)
    assert [link.between(0, end) for end in (5, 19, 20, 29, 30, 99)] == [0, 0, 500, 500, 1500, 1500]
    assert link.between(20, 30) == 1000


@pytest.mark.root
def test_every_packet_is_noted_when_it_leaves(tmp_path: Path, quick_python: list[str]) -> None:
    try:
        with Testbed(hosts=2, link_mbit=100.0) as testbed, noted(testbed, tmp_path):
            printed = testbed.launch([*quick_python, str(SENDS)], timeout_s=60)
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))
    begin, end, sent = json.loads(printed[0])
    first, second = packets_of(tmp_path, hosts=2)
    assert sent <= first.between(begin, end) <= 1.01 * sent
    # No more than the shaper lets through: 128 KiB at once, and 0.625 MB in 50 ms.
    assert first.between(begin, begin + 50 * MS) < 0.4 * sent
    assert second.between(begin, end) < 0.01 * sent


def test_rows_of_one_kind_are_renewed() -> None:
    kept = {"meta": {"date": "1"}, "rows": [{"kind": k, "at": 1} for k in ("skew", "wire", "cost")]}
    result = renewed(kept, {"meta": {"date": "2"}, "rows": [{"kind": "wire", "at": 2}] * 2})
    assert [(row["kind"], row["at"]) for row in result["rows"]] == [
        ("skew", 1),
        ("wire", 2),
        ("wire", 2),
        ("cost", 1),
    ]
    assert result["meta"] == {"date": "1", "renewed": {"wire": {"date": "2"}}}
    again = renewed(result, {"meta": {"date": "3"}, "rows": [{"kind": "skew", "at": 3}]})
    assert again["meta"]["renewed"] == {"wire": {"date": "2"}, "skew": {"date": "3"}}


def test_a_clock_that_is_further_off_than_it_says_is_counted() -> None:
    readings = [[(0, 0)] * 4, [(10_000, 20_000), (-30_000, 20_000), (0, 1_000), (500, 500)]]
    (row,) = clock_rows(Path(), readings, load="idle", link_mbit=200.0)
    assert row["within"] == 0.75
    assert (row["median_us"], row["worst_us"]) == (5.25, 30)


def test_cost_is_the_difference_of_neighbours(tmp_path: Path) -> None:
    run = Planted(steps=6, buckets=3).run()
    write(tmp_path / "run-0", coarse(run, 1, 5).ranks.values())
    of_rank: dict[str, Any] = {"without": [(10, 5), (20, 6), (90, 7)], "first": 3}
    of_rank["with"] = [(11, 7), (21, 8), (91, 9)]
    (row,) = cost_rows(tmp_path, [of_rank, of_rank], codec="int8")
    assert (row["step_ms"], row["step_more_ms"], row["cpu_more_ms"]) == (20, 1, 2)
    assert row["step_more_low_ms"] == row["step_more_high_ms"] == 1
    assert row["buckets"] == 3
    assert row["detailed"] == pytest.approx(5 / 6), "of the steps that count"
    assert 0 < row["overhead"] < 0.01


def a_result(tmp_path: Path) -> dict[str, Any]:
    miss = {"planted_ms": 50.0, "count": 2, "median_ms": 0.1, "bias_ms": 0.1, "worst_ms": -0.25}
    readings = [[(0, 0)], [(9_000, 20_000)]]
    of_clocks = clock_rows(Path(), readings, load="one way", link_mbit=200.0)
    more = {f"{n}_more{p}_ms": 0.1 for n in ("step", "cpu") for p in ("", "_low", "_high")}
    rows = [
        {"kind": "skew", "codec": "int8", **miss},
        {"kind": "codec", "known_ms": 8.0, **miss},
        *medians_of([a_wire_row(tmp_path / "wire", link_mbit=1000.0)]),
        *of_clocks,
        {
            "kind": "cost",
            "codec": "ddp",
            "buckets": 8,
            "rounds": 6,
            "step_ms": 20.0,
            "cpu_ms": 10.0,
            "overhead": 0.004,
            "detailed": 0.5,
            **more,
        },
    ]
    return {"meta": META, "rows": rows}


def test_every_row_is_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = a_result(tmp_path)
    result["meta"] = {**META, "renewed": {"wire": {**META, "git_commit": "0123456789"}}}
    made = [SECTIONS[f"profile-{name}"][1] for name in SHOWN]
    texts = [make(result) for make in made]
    commits = ["unknown", "0123456", *["unknown"] * 2]
    for text, commit in zip(texts, commits, strict=True):
        assert f"2026-11-22, commit {commit}, " in str(text)
    assert "0.25 ms" in str(texts[0])
    assert "| 433.3 | 45 % (45 to 45) | 533.3 | 123.1 % (123.1 to 123.1) | 800.0 |" in str(texts[1])
    assert "| messages one way | 1 | 9 µs | 9 µs | ± 20 µs | 100 % |" in str(texts[2])
    assert "| 0.4 % | 50 % |" in str(texts[3])
    assert [make({"meta": META, "rows": []}) for make in made] == [None] * 4
    Record(argparse.Namespace(json=None)).add(result["rows"], *made)
    assert capsys.readouterr().out.count("<sub>") == 4


LOCAL = "streaming@16:fragments=2,overlap_steps=1/none"
SCHEDULE = {"sync_every": 16, "fragments": 2, "overlap_steps": 1}
LOCAL_META = {
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
    table = LOCAL_STEPS({"meta": LOCAL_META, "rows": rows})
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
    table = WHATIF_FSDP({"meta": {**LOCAL_META, **meta, "arguments": arguments}, "rows": rows})
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
