"""CommProfiler in real training loops of two ranks: what was planted is what it says."""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import run
from wandb_runs import history, records

from lightning_dist import CommProfiler
from lightning_dist.profiling.breakdown import parts_of
from lightning_dist.profiling.folder import Run, read_run
from lightning_dist.profiling.parts import PARTS
from lightning_dist.profiling.whatif.costs_file import read_costs

SCRIPT = Path(__file__).with_name("scenarios") / "profiled.py"
LOOPS = (
    "skew ddp",
    "skew int8",
    "codec time",
    "same bits",
    "accumulation",
    "failing",
    "told to end",
)
RESIDUALS = ("residual healthy", "residual growing")
ENDS = ("lost at the end", "late at the end")
ODD = (
    "hanging",
    "twice",
    "zoomed",
    "alone",
    "other hook",
    "no folder",
    "no folder on one",
    "own folders",
)
FRAMEWORKS = (
    "lightning compressed_ddp",
    "lightning ddp",
    "lightning manual ddp",
    "lightning manual int8",
    "lightning predicted",
    "lightning failing",
    "lightning told to end",
    "fabric",
)
CASES = (*LOOPS, *RESIDUALS, *ENDS, *ODD, *FRAMEWORKS, "accelerate")
MS = 1e6
PLANTED = {4: 50, 6: 100, 8: 100}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("profiles")
    done = run([*quick_python, SCRIPT, folder, *CASES], limit=110).require_success()
    assert done.output.count("[0, 0]") == len(CASES), done.output
    return {name: folder / name.replace(" ", "-") for name in CASES}


def truth(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"truth-{rank}.json").read_text()) for rank in range(2)]


def profile(folder: Path, run: int = 0) -> tuple[Run, dict[str, Any]]:
    found = folder / f"run-{run}"
    return read_run(found), json.loads((found / "summary.json").read_text())


@pytest.mark.parametrize("codec", ["ddp", "int8"])
def test_planted_skew_is_waiting_for_that_rank(codec: str, folders: dict[str, Path]) -> None:
    known = [each["launched"] for each in truth(folders[f"skew {codec}"])]
    profiled, _ = profile(folders[f"skew {codec}"])
    lates = {step: (known[1][step] - known[0][step]) / MS for step in PLANTED}
    # A machine with something else to do may hold up rank 0 as well, in some of the steps.
    assert any(lates[step] > planted / 2 for step, planted in PLANTED.items()), lates
    for step, late in lates.items():
        first, second = parts_of(profiled, step)
        assert first.waited_for.get(1, 0) / MS == pytest.approx(max(0.0, late), abs=2)
        assert sum(second.waited_for.values()) / MS < 2 + max(0.0, -late)


def test_planted_codec_time_is_codec_time(folders: dict[str, Path]) -> None:
    known = sum(each["encode_ms"] for each in truth(folders["codec time"])) / 2
    profiled, _ = profile(folders["codec time"])
    spans = [
        span
        for of_rank in profiled.ranks.values()
        for step in of_rank.steps.values()
        for span in step.spans
        if span.phase == "encode"
    ]
    steps = sum(len(of_rank.steps) for of_rank in profiled.ranks.values())
    measured = sum(span.end - span.begin for span in spans) / steps / MS
    assert measured == pytest.approx(known, abs=2)
    assert known > 10


@pytest.mark.parametrize("name", ["skew ddp", "skew int8", "codec time", "accumulation"])
def test_the_parts_add_up_to_the_step(name: str, folders: dict[str, Path]) -> None:
    profiled, _ = profile(folders[name])
    for step in profiled.common_steps:
        for each in parts_of(profiled, step):
            assert set(each.parts) == set(PARTS)
            assert all(value >= 0 for value in each.parts.values())
            assert sum(each.parts.values()) == each.duration
            assert each.parts["other"] < 0.02 * each.duration


def test_weights_are_those_without_it(folders: dict[str, Path]) -> None:
    for found in truth(folders["same bits"]):
        assert found["None True"] == found["None False"]
        assert found["int8 True"] == found["int8 False"]
        assert found["None True"] != found["int8 True"]


def test_a_residual_that_grows_without_end_is_told_once(folders: dict[str, Path]) -> None:
    profiled, summary = profile(folders["residual growing"])
    (note,) = [note for note in summary["notes"] if "residual of bucket" in note]
    assert "has grown from" in note
    for rank in range(2):
        output = (folders["residual growing"] / f"output-{rank}.txt").read_text()
        assert output.count(f"[rank: {rank}] CommProfiler: the residual of bucket") == 1
        assert "Use a codec or options that lose less" in output
    for of_rank in profiled.ranks.values():
        assert len(of_rank.errors) >= 10  # a machine that is busy looks less often
        assert all(each.relative_l2 == pytest.approx(1.2, abs=0.01) for each in of_rank.errors)
        assert all(each.cosine == pytest.approx(-1, abs=0.01) for each in of_rank.errors)


def test_a_residual_that_levels_off_is_no_reason_to_warn(folders: dict[str, Path]) -> None:
    profiled, summary = profile(folders["residual healthy"])
    assert not [note for note in summary["notes"] if "residual" in note]
    assert "the residual of" not in (folders["residual healthy"] / "output-0.txt").read_text()
    for of_rank in profiled.ranks.values():
        assert len(of_rank.errors) >= 10
        assert all(0 < each.relative_l2 < 1 and 0 < each.cosine < 1 for each in of_rank.errors)
        assert max(each.residual_ratio for each in of_rank.errors) > 1


def test_accumulated_passes_are_one_step_and_evaluation_is_none(folders: dict[str, Path]) -> None:
    profiled, _ = profile(folders["accumulation"])
    assert profiled.common_steps == list(range(6))
    for step in profiled.ranks[0].steps.values():
        names = [phase.name for phase in step.phases]
        assert names.count("forward") == names.count("backward") == 2
        assert names.count("optimizer") == 1
    for earlier, later in zip(range(5), range(1, 6), strict=True):
        steps = profiled.ranks[0].steps
        apart = steps[later].begin - steps[earlier].begin - steps[earlier].duration
        assert apart / MS >= 50  # what an evaluation took


@pytest.mark.parametrize(
    ("name", "inside", "reason"),
    [
        ("failing", "", "ArithmeticError: the loss is odd"),
        ("told to end", "", "SystemExit: 143"),
        ("lightning failing", "comm_profile", "ArithmeticError: the loss is odd"),
        ("lightning told to end", "comm_profile", "SIGTERMException"),
    ],
)
def test_a_run_that_failed_has_a_report(
    name: str, inside: str, reason: str, folders: dict[str, Path]
) -> None:
    profiled, summary = profile(folders[name] / inside)
    assert profiled.ranks[0].end is not None
    assert profiled.ranks[0].end.reason.startswith(reason)
    assert 5 <= len(profiled.ranks[0].steps) <= 9
    assert summary["steps"] > 0
    assert (folders[name] / inside / "run-0" / "report.html").stat().st_size > 1e6


@pytest.mark.parametrize("name", ENDS)
def test_a_rank_that_does_not_come_to_the_end_costs_no_report(
    name: str, folders: dict[str, Path]
) -> None:
    profiled, summary = profile(folders[name])
    assert list(profiled.ranks[0].steps) == list(range(12))
    assert profiled.ranks[0].end is not None
    assert profiled.ranks[0].end.reason == "finished"
    assert summary["steps"] > 0
    output = (folders[name] / "output-0.txt").read_text()
    assert "at the end a rank was gone or late, so clocks were not compared" in output
    assert "of the step is exposed communication" in output


def test_a_late_rank_is_not_waited_for_without_end(folders: dict[str, Path]) -> None:
    waited = json.loads((folders["late at the end"] / "truth-0.json").read_text())["seconds"]
    assert waited < 20  # gloo's own patience, in this test: 60


def test_clocks_are_compared_at_the_begin_and_the_end(folders: dict[str, Path]) -> None:
    profiled, _ = profile(folders["skew ddp"])
    for each in profiled.ranks.values():
        last = max(step.begin for step in each.steps.values())
        assert [reading.at > last for reading in each.clocks] == [False, True]


def test_sigterm_is_an_exception_until_the_report_is_made(folders: dict[str, Path]) -> None:
    assert truth(folders["told to end"]) == [{"code": 143, "usual": True}] * 2


def test_what_would_help_is_measured_when_it_is_over(folders: dict[str, Path]) -> None:
    folder = folders["lightning predicted"]
    _, summary = profile(folder / "comm_profile")
    found = summary["whatif"]
    assert "whatif" not in summary["reasons"]
    assert found["label"] == "PREDICTION, not measured"
    assert found["current"]["codec"] == "ddp"
    assert abs(found["error"]) <= found["margin"]
    told = {each["codec"] for each in found["others"] if each["step_ms"]}
    assert {"none", "fp16", "int8", "int4", "sign", "topk", "powersgd"} <= told
    kept = read_costs(folder / "comm_profile" / "run-0")
    assert set(kept.by_name) >= told - {"ddp"}
    assert "not compiled, on " in kept.by_name["int8"].source
    assert "after this run" in kept.by_name["int8"].source
    assert re.search(
        r" (Predicted with .*: \d.*x|No other setting is predicted to be faster .* tell)\.$",
        summary["headline"],
    )
    output = (folder / "output-0.txt").read_text()
    assert summary["headline"] in output
    assert output.count("PREDICTION, not measured") == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("failing", "the training did not end by itself"),
        ("lightning told to end/comm_profile", "the training did not end by itself"),
        ("twice", "the training was shorter than 30 s"),
        ("fabric", "whatif=False"),
    ],
)
def test_what_would_help_is_not_measured_for(
    name: str, reason: str, folders: dict[str, Path]
) -> None:
    case, _, inside = name.partition("/")
    _, summary = profile(folders[case] / inside)
    assert summary["whatif"] is None
    found = summary["reasons"]["whatif"]
    assert found == f"{reason}; `lightning-dist profile whatif DIR` measures"
    assert not (folders[case] / inside / "run-0" / "costs.json").exists()


def test_a_hang_leaves_the_flight_record_beside_the_report(folders: dict[str, Path]) -> None:
    found = folders["hanging"] / "run-0"
    assert len(read_run(found).common_steps) == 4
    assert (found / "report.html").is_file()
    for rank in range(2):
        entries = json.loads((found / f"flight-rank{rank}.json").read_text())["entries"]
        assert any("all_reduce" in entry["profiling_name"] for entry in entries)


def test_a_model_can_be_profiled_again(folders: dict[str, Path]) -> None:
    for number in range(2):
        profiled, summary = profile(folders["twice"], number)
        assert profiled.common_steps == list(range(12))
        assert summary["traffic"]["wire_bytes"] > 0
        assert {link["peer"] for link in summary["links"]} == {None, 0, 1}
    for each in truth(folders["twice"]):
        assert each["opened"] == [each["opened"][0]] * 3


def test_zoom_writes_traces_of_steps_that_are_left_out(folders: dict[str, Path]) -> None:
    for number, (first, steps) in enumerate([(3, {3, 4, 5}), (4, {4, 5, 6, 7})]):
        profiled, _ = profile(folders["zoomed"], number)
        assert set(range(12)) - set(profiled.common_steps) == steps
        for rank in range(2):
            name = f"zoom-rank{rank}-step{first}.json.gz"
            with gzip.open(folders["zoomed"] / f"run-{number}" / name) as trace:
                names = {event.get("name", "") for event in json.load(trace)["traceEvents"]}
            assert any("AddmmBackward" in name for name in names)
    assert all(each["usual"] for each in truth(folders["zoomed"]))


def test_a_run_that_ends_within_a_zoom_leaves_its_steps_out(folders: dict[str, Path]) -> None:
    for number, (kept, traces) in enumerate([([0, 1, 2], 2), ([0, 1, 2, 3], 0)]):
        profiled, _ = profile(folders["zoomed"] / "short", number)
        assert profiled.common_steps == kept
        found = list((folders["zoomed"] / "short" / f"run-{number}").glob("zoom-*"))
        assert len(found) == traces


def test_one_rank_has_nothing_to_exchange(folders: dict[str, Path]) -> None:
    _, summary = profile(folders["alone"] / "0")
    assert summary["traffic"] is None
    assert summary["reasons"]["traffic"] == "one rank sends nothing"
    assert summary["step_ms"]["mean"] > 0


def test_what_is_not_measured_has_its_reason(folders: dict[str, Path]) -> None:
    output = (folders["other hook"] / "output-0.txt").read_text()
    assert "buckets: n/a, the model has a communication hook already (fp16_compress_hook)" in output
    _, summary = profile(folders["other hook"])
    assert summary["traffic"] is None
    assert summary["reasons"]["traffic"]
    assert summary["step_ms"]["mean"] > 0


def test_a_folder_that_cannot_be_made_is_another_one(folders: dict[str, Path]) -> None:
    found = {each["found"] for each in truth(folders["no folder"])}
    assert len(found) == 1
    other = Path(found.pop())
    assert read_run(other).common_steps
    assert f"the profile is in {other}" in (folders["no folder"] / "output-0.txt").read_text()
    for path in other.iterdir():
        path.unlink()
    other.rmdir()


def test_a_rank_without_a_folder_keeps_nothing_and_says_so(folders: dict[str, Path]) -> None:
    folder = folders["no folder on one"]
    profiled = read_run(folder / "profiles" / "run-0")
    assert list(profiled.ranks) == [0]
    assert "nothing of rank 1" in profiled.notes
    told = "[rank: 1] CommProfiler: profiles/run-0: Not a directory; the steps of this rank are not"
    assert told in (folder / "output-1.txt").read_text()
    assert [each["summary"] for each in truth(folder)] == [True, False]


def test_lines_of_other_disks_reach_rank_0(folders: dict[str, Path]) -> None:
    first, second = truth(folders["own folders"])
    assert first["ranks"] == ["rank0.jsonl", "rank1.jsonl"]
    assert second["ranks"] == ["rank1.jsonl"]
    assert first["left"] == second["left"] == 0
    disks = [folders["own folders"] / f"disk-{rank}" / "profiles" / "run-0" for rank in range(2)]
    assert (disks[0] / "rank1.jsonl").read_bytes() == (disks[1] / "rank1.jsonl").read_bytes()
    gathered = read_run(disks[0])
    assert len(gathered.common_steps) == 230
    assert gathered.notes == []


@pytest.mark.parametrize("strategy", ["compressed_ddp", "ddp"])
def test_a_callback_of_lightning(strategy: str, folders: dict[str, Path]) -> None:
    folder = folders[f"lightning {strategy}"]
    profiled, summary = profile(folder / "comm_profile")
    assert profiled.common_steps == list(range(24))  # and no validation among them
    assert summary["run"]["codec"] == ("ddp" if strategy == "ddp" else "Int8(block_size=256)")
    output = (folder / "output-0.txt").read_text()
    assert "of the step is exposed communication" in output
    assert "of the step is exposed" not in (folder / "output-1.txt").read_text()
    files = {path.name for path in (folder / "comm_profile" / "run-0").iterdir()}
    made = {"meta.json", "summary.json", "report.html", "trace.json.gz"}
    made |= {"steps.csv", "buckets.csv"}
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
        assert names == [*(["data"] if number % 2 == 0 else []), "backward", "optimizer"]
        if number % 2 == 0 and number not in (0, 24):  # what a pass does after its last step
            assert step.phases[0].end / MS >= 10
        if step.detailed:
            orders = [span.order for span in step.spans if span.phase == "exchange"]
            assert orders
            assert len({bucket.index for bucket in step.buckets}) == len(step.buckets) > 0
    for step in profiled.common_steps:
        for each in parts_of(profiled, step):
            assert sum(each.parts.values()) == each.duration
    assert summary["exposed_ms"] > 0
    assert summary["reasons"]["forward"] == "the passes ran within each other; both are in backward"


@pytest.mark.parametrize("strategy", ["compressed_ddp", "ddp"])
def test_loggers_hear_of_it(strategy: str, folders: dict[str, Path]) -> None:
    path = folders[f"lightning {strategy}"] / "csv" / "version_0" / "metrics.csv"
    rows = list(csv.DictReader(path.open()))
    live = [row for row in rows if row.get("comm/exposed_pct")]
    assert len(live) >= 2
    assert all(0 < float(row["comm/exposed_pct"]) < 100 for row in live)
    lost = [float(row["comm/err_rel_l2"]) for row in rows if row.get("comm/err_rel_l2")]
    assert (strategy == "ddp") == (lost == [])
    assert all(0 < each < 0.02 for each in lost)
    ratio = float(live[-1]["comm/ratio"])
    assert ratio == 1.0 if strategy == "ddp" else 3.5 < ratio < 4
    assert any(row.get("comm/codec_ms") for row in rows) == (strategy != "ddp")
    assert float(live[-1]["comm/wait_ms"]) >= 0  # what only all ranks together know


def test_wandb_gets_numbers_table_and_files(folders: dict[str, Path]) -> None:
    (log,) = (folders["lightning compressed_ddp"]).glob("wandb/offline-run-*/run-profiled.wandb")
    found = history(log)
    metrics = {"/".join(key.split("/")[:2]) for key in found if key.startswith("comm/")}
    assert {"comm/exposed_pct", "comm/wait_ms", "comm/buckets", "comm/report"} <= metrics
    assert len(metrics) <= 32  # wandb slows down with many keys
    assert all(0 < float(value) < 100 for value in found["comm/exposed_pct"])
    assert "comm-profile-profiled" in {record.artifact.name for record in records(log)}
    assert list(log.parent.glob("files/media/html/comm/report*.html"))
    assert list(log.parent.glob("files/media/table/comm/buckets*.json"))


@pytest.mark.parametrize("name", ["fabric", "accelerate"])
def test_other_loops(name: str, folders: dict[str, Path]) -> None:
    profiled, summary = profile(folders[name])
    assert profiled.common_steps == list(range(12))
    assert summary["run"]["codec"] == "Int8(block_size=256)"
    assert summary["traffic"]["wire_bytes"] < summary["traffic"]["raw_bytes"] / 3


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="with CommProfiler"):
        CommProfiler().__enter__()
    import torch

    with pytest.raises(ValueError, match="DistributedDataParallel, got Linear"):
        CommProfiler(torch.nn.Linear(1, 1)).__enter__()


@pytest.mark.parametrize(("case", "codec"), [("skew int8", "int8"), ("skew ddp", "ddp")])
def test_meta_says_what_it_is_of(case: str, codec: str, folders: dict[str, Path]) -> None:
    run, summary = profile(folders[case])
    meta = json.loads((folders[case] / "run-0" / "meta.json").read_text())
    assert (meta["schema"], meta["world_size"], meta["backend"]) == (1, 2, "gloo")
    assert meta["hosts"] == summary["run"]["hosts"]
    assert meta["codec"] == run.ranks[0].about.codec
    assert codec in meta["codec"].lower()
    assert (meta["compression"] is None) == (codec == "ddp")
    parameters = meta["gradients"]["parameters"]
    assert meta["gradients"]["bytes"] == 4 * parameters
    raw = sum(bucket["raw_mb"] for bucket in summary["buckets"])
    assert raw == pytest.approx(4 * parameters / 1e6, rel=1e-3), "2 ranks: each sends all of it"
    assert meta["profiler"]["budget"] == run.ranks[0].about.budget
    assert meta["versions"]["torch"] == run.ranks[0].about.versions["torch"]
