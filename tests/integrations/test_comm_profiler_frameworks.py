"""CommProfiler as a callback of Lightning, and under Fabric and Accelerate."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from comm_profiles import (
    MS,
    profile,
    profiles,
    require_no_prediction,
    require_report_of_failure,
    truth,
)
from wandb_runs import history, records

from lightning_dist.profiling.analysis.breakdown import analyse, exposed_in
from lightning_dist.profiling.analysis.intervals import difference
from lightning_dist.profiling.capture.events import PHASES, BucketTimes
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.costs import read_costs
from lightning_dist.profiling.whatif.observe import observe

pytestmark = pytest.mark.slow
CASES = (
    *(f"lightning {name}" for name in ("compressed_ddp", "ddp", "manual ddp", "manual int8")),
    *(f"lightning {name}" for name in ("predicted", "failing", "told to end")),
    *("fabric", "accelerate", "local updates", "lightning local"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> dict[str, Path]:
    return profiles(tmp_path_factory.mktemp("profiles"), CASES, python=quick_python)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lightning failing", "ArithmeticError: the loss is odd"),
        ("lightning told to end", "SIGTERMException"),
    ],
)
def test_a_run_that_failed_has_a_report(name: str, reason: str, folders: dict[str, Path]) -> None:
    require_report_of_failure(folders[name] / "comm_profile", reason)


def test_what_would_help_is_measured_when_it_is_over(folders: dict[str, Path]) -> None:
    folder = folders["lightning predicted"]
    _, summary = profile(folder / "comm_profile")
    found = summary["predictions"]
    assert "predictions" not in summary["unavailable"]
    assert found["label"] == "Predicted step time (simulated)"
    assert found["baseline"]["codec"] == "ddp"
    assert abs(found["error"]) <= found["tolerance"]
    told = {each["codec"] for each in found["scenarios"] if each["step_ms"]}
    assert {"none", "fp16", "int8", "int4", "sign", "topk", "powersgd"} <= told
    kept = read_costs(folder / "comm_profile" / "run-0")
    assert set(kept.by_name) >= told - {"ddp"}
    source = kept.by_name["int8"].source
    assert source.startswith("measured alone on ")
    assert source.endswith(", not compiled")
    assert "after this run" in kept.by_name["int8"].source
    nothing = "No other setting is predicted .* of the model(; .* may be, under .*)?"
    assert re.search(rf" (Predicted with .*: \d.*x|{nothing})\.$", summary["headline"])
    output = (folder / "output-0.txt").read_text()
    assert summary["headline"] in output
    assert output.count("Predicted step time (simulated)") == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lightning told to end/comm_profile", "the training did not end by itself"),
        ("fabric", "predict=False"),
    ],
)
def test_what_would_help_is_not_measured_for(
    name: str, reason: str, folders: dict[str, Path]
) -> None:
    case, _, inside = name.partition("/")
    require_no_prediction(folders[case] / inside, reason)


def test_exchanges_of_local_updates_are_in_the_profile(folders: dict[str, Path]) -> None:
    profiled, summary = profile(folders["local updates"])
    assert [len(rank.steps) for rank in profiled.ranks.values()] == [12, 12]
    assert {each.codec for each in _buckets(profiled)} == {"int8+none"}
    for step in profiled.common_steps:
        waiting, late = sorted(analyse(profiled, step), key=lambda each: each.rank)
        assert sum(late.parts.values()) == late.duration
        exchanges = step % 4 == 3
        assert exchanges == bool(waiting.ns["exposed"]) == bool(late.ns["exposed"])
        assert waiting.parts["exposed_wait"] >= 50 * MS * exchanges  # 250 are planted
        assert late.parts["other"] >= 250 * MS * exchanges
        control = [each for each in waiting.exchanges if each.group == "control"]
        assert len(control) == exchanges
        # That an exchange has ended may be noticed after the step has.
        intervals = [(each.begin, min(each.end, waiting.duration)) for each in control]
        assert not difference(intervals, exposed_in(waiting.record))
    reason = "with local updates, everything but the exchange is in other"
    assert dict.fromkeys(PHASES, reason).items() <= summary["unavailable"].items()
    assert {summary["breakdown_ms"][phase] for phase in PHASES} == {None}
    assert {each["step"] for each in summary["errors"]} == {11}  # of the third exchange
    with pytest.raises(ValueError, match=r"profile some steps of DDP.*--local-steps 4"):
        observe(profiled)
    profiled, summary = profile(folders["lightning local"] / "comm_profile")
    assert [len(rank.steps) for rank in profiled.ranks.values()] == [24, 24]
    assert summary["traffic"]["wire_bytes"] > 0


def _buckets(profiled: Run) -> Iterator[BucketTimes]:
    for rank in profiled.ranks.values():
        for step in rank.steps.values():
            yield from step.buckets


@pytest.mark.parametrize("strategy", ["compressed_ddp", "ddp"])
def test_a_callback_of_lightning(strategy: str, folders: dict[str, Path]) -> None:
    folder = folders[f"lightning {strategy}"]
    profiled, summary = profile(folder / "comm_profile")
    assert profiled.common_steps == list(range(24))  # and no validation among them
    assert summary["run"]["codec"] == ("ddp" if strategy == "ddp" else "Int8(block_size=256)")
    meta = json.loads((folder / "comm_profile" / "run-0" / "meta.json").read_text())
    told = summary["run"]["script"], summary["run"]["started"]
    assert told == (meta["script"], meta["started"])
    assert Path(told[0]).suffix == ".py"
    output = (folder / "output-0.txt").read_text()
    assert "of the step is exposed communication" in output
    assert "of the step is exposed" not in (folder / "output-1.txt").read_text()
    files = {path.name for path in (folder / "comm_profile" / "run-0").iterdir()}
    made = {"meta.json", "summary.json", "report.html", "trace.json.gz"}
    made |= {"steps.csv"}
    assert files == {"rank0.jsonl", "rank1.jsonl", *made}
    with gzip.open(folder / "comm_profile" / "run-0" / "trace.json.gz") as trace:
        assert json.load(trace)["traceEvents"]


@pytest.mark.parametrize("codec", ["ddp", "int8"])
def test_every_optimizer_step_of_manual_optimization_is_a_step(
    codec: str, folders: dict[str, Path]
) -> None:
    folder = folders[f"lightning manual {codec}"]
    profiled, summary = profile(folder)
    steps = truth(folder)[0]["steps"]
    assert steps == 48
    assert profiled.common_steps == list(range(steps))
    for number, step in profiled.ranks[0].steps.items():
        names = [phase.name for phase in step.phases]
        assert names == [*(["between_steps"] if number % 2 == 0 else []), "backward", "optimizer"]
        if number % 2 == 0 and number not in (0, 24):  # what a pass does after its last step
            assert step.phases[0].end / MS >= 10
        if step.detailed:
            orders = [span.order for span in step.spans if span.phase == "exchange"]
            assert orders
            assert len({bucket.index for bucket in step.buckets}) == len(step.buckets) > 0
    for step in profiled.common_steps:
        for each in analyse(profiled, step):
            assert sum(each.parts.values()) == each.duration
    assert summary["exposed_ms"] > 0
    assert (
        summary["unavailable"]["forward"]
        == "forward and backward pass overlap; both are in backward"
    )


@pytest.mark.parametrize("strategy", ["compressed_ddp", "ddp"])
def test_loggers_hear_of_it(strategy: str, folders: dict[str, Path]) -> None:
    path = folders[f"lightning {strategy}"] / "csv" / "version_0" / "metrics.csv"
    rows = list(csv.DictReader(path.open()))
    live = [row for row in rows if row.get("comm/exposed_fraction")]
    assert len(live) >= 2
    assert all(0 < float(row["comm/exposed_fraction"]) < 1 for row in live)
    lost = [
        float(row["comm/error_relative_l2"]) for row in rows if row.get("comm/error_relative_l2")
    ]
    assert (strategy == "ddp") == (lost == [])
    assert all(0 < each < 0.02 for each in lost)
    ratio = float(live[-1]["comm/compression_ratio"])
    assert ratio == 1.0 if strategy == "ddp" else 3.5 < ratio < 4
    assert any(row.get("comm/codec_total_ms") for row in rows) == (strategy != "ddp")
    assert float(live[-1]["comm/exposed_wait_ms"]) >= 0  # what only all ranks together know


def test_wandb_gets_numbers_table_and_files(folders: dict[str, Path]) -> None:
    (log,) = (folders["lightning compressed_ddp"]).glob("wandb/offline-run-*/run-profiled.wandb")
    found = history(log)
    metrics = {"/".join(key.split("/")[:2]) for key in found if key.startswith("comm/")}
    assert {
        "comm/exposed_fraction",
        "comm/exposed_wait_ms",
        "comm/buckets",
        "comm/report",
    } <= metrics
    assert len(metrics) <= 32  # wandb slows down with many keys
    assert all(0 < float(value) < 1 for value in found["comm/exposed_fraction"])
    assert "comm-profile-profiled" in {record.artifact.name for record in records(log)}
    assert list(log.parent.glob("files/media/html/comm/report*.html"))
    assert list(log.parent.glob("files/media/table/comm/buckets*.json"))


@pytest.mark.parametrize("name", ["fabric", "accelerate"])
def test_other_loops(name: str, folders: dict[str, Path]) -> None:
    profiled, summary = profile(folders[name])
    assert profiled.common_steps == list(range(12))
    assert summary["run"]["codec"] == "Int8(block_size=256)"
    assert summary["traffic"]["wire_bytes"] < summary["traffic"]["raw_bytes"] / 3
