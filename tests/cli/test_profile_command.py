"""``lightning-dist profile``."""

import csv
import gzip
import json
import os
import sys
from pathlib import Path

import pytest
from calls import LOADED, printed, profile, refusal, save
from planted import Planted, bare, replace
from processes import run

from lightning_dist.measurement import CodecCost
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.report.files import to_json
from lightning_dist.profiling.run import read_run
from lightning_dist.profiling.whatif.predict import Costs, read_costs, with_whatif, write_costs

PLANTED = Planted(steps=12, late={1: 50}, slow_steps={step: 1 + step % 3 for step in range(12)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "run", PLANTED.run())


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"rank0.jsonl", "rank1.jsonl"}


def test_report_prints_the_summary_and_writes_the_page(folder: Path) -> None:
    text = printed("profile", "report", folder)
    run = read_run(folder)
    summary = with_whatif(summarize(run), run, lambda observed: read_costs(folder))
    assert text.startswith(summary.headline)
    assert text.endswith(f"written to {folder}: summary.json, report.html\n")
    assert written(folder) == {"summary.json", "report.html"}
    assert summary.headline in (folder / "report.html").read_text()
    assert (folder / "summary.json").read_text() == to_json(summary.as_dict()) + "\n"


def test_report_writes_what_is_asked_for(folder: Path) -> None:
    assert profile("report", folder, "--no-html", "--trace", "--csv").exit_code == 0
    assert written(folder) == {"summary.json", "trace.json.gz", "steps.csv"}
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"
             if "name" in event["args"]}  # fmt: skip
    assert {"rank 0 @ node-a", "rank 1 @ node-b"} <= names
    assert set(trace["otherData"].values()) == {"median step", "p95 step"}
    with (folder / "steps.csv").open(newline="") as rows:
        assert len(list(csv.DictReader(rows))) == 24


def test_files_go_elsewhere(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "not" / "yet"
    assert profile("report", folder, "--no-html", "--out", there).exit_code == 0
    assert written(there) == {"summary.json"}
    assert written(folder) == set()


def test_files_are_made_anew(folder: Path) -> None:
    profile("report", folder, "--no-html")
    fresh = (folder / "summary.json").read_bytes()
    (folder / "summary.json").write_text("old")
    profile("report", folder, "--no-html")
    assert (folder / "summary.json").read_bytes() == fresh


def test_json_and_nothing_else(folder: Path) -> None:
    text = printed("profile", "report", folder, "--json", "--no-html")
    assert json.loads(text) == json.loads((folder / "summary.json").read_text())
    assert json.loads(text)["straggler"] == 1


def test_what_cannot_be_written_is_said_and_the_summary_still_printed(folder: Path) -> None:
    for name in ("summary.json", "steps.csv"):
        (folder / name).mkdir()
    result = profile("report", folder, "--no-html")
    assert result.exit_code == 0  # nobody has asked for that file
    assert result.stdout.startswith(summarize(read_run(folder)).headline)
    assert result.stderr == (
        f"lightning-dist: summary.json not written to {folder}: Is a directory\n"
    )
    asked = profile("report", folder, "--no-html", "--csv", "--trace")
    assert asked.exit_code == 2
    assert "steps.csv not written" in asked.stderr
    assert asked.stdout.endswith(f"written to {folder}: trace.json.gz\n")
    assert {path.name for path in folder.glob(".*")} == set()


def test_a_place_that_cannot_be(folder: Path) -> None:
    result = profile("report", folder, "--json", "--out", folder / "rank0.jsonl")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["steps"] == 10
    assert result.stderr.count("not written") == 2


def test_half_a_run_is_half_a_report(folder: Path) -> None:
    (folder / "rank1.jsonl").unlink()
    lines = (folder / "rank0.jsonl").read_text()
    (folder / "rank0.jsonl").write_text(lines[: len(lines) // 2])
    text = printed("profile", "report", folder, "--trace", "--csv")
    assert "note: nothing of rank 1" in text
    assert "note: rank0.jsonl: 1 line truncated or invalid" in text


def test_a_profile_without_steps_says_why_and_fails(tmp_path: Path) -> None:
    folder = save(tmp_path / "none", Planted(steps=0).run())
    result = profile("report", folder, "--no-html")
    assert result.exit_code == 2
    assert result.stdout.startswith("No data: no step was recorded on any rank: ")
    assert result.stderr == (
        f"lightning-dist: no report for {folder}: no step was recorded on any rank: no optimizer "
        "has stepped with parameters of the model; profile a few steps or more\n"
    )
    assert written(folder) == {"summary.json"}


def test_what_has_no_steps_is_compared_with_nothing(tmp_path: Path, folder: Path) -> None:
    empty = save(tmp_path / "none", Planted(steps=0).run())
    for options in ([], ["--json"]):
        result = profile("compare", folder, empty, *options)
        assert result.exit_code == 2
        assert "The steps cannot be compared" in result.stdout
        assert result.stderr.startswith(
            f"lightning-dist: no report for {empty}: no step was recorded on any rank: "
        )
        assert result.stderr.count("\n") == 1


def test_the_newest_of_several_runs(tmp_path: Path, folder: Path) -> None:
    older = save(tmp_path / "run2", PLANTED.run())
    for path in older.iterdir():
        os.utime(path, (1, 1))
    note = f"lightning-dist: {folder.name} is the newest run in {tmp_path}; others: run2\n"
    result = profile("compare", tmp_path, older)
    assert result.stderr == note
    assert f"A: {folder} (" in result.stdout
    for command in ("report", "whatif"):
        assert note in profile(command, tmp_path).stderr


def test_what_is_no_profile(tmp_path: Path, folder: Path) -> None:
    for command in (["report"], ["compare", folder]):
        said = refusal("profile", *command, tmp_path / "no")
        assert said == f"{tmp_path}/no is not a folder; give one that CommProfiler has written"
        (tmp_path / "empty").mkdir(exist_ok=True)
        said = refusal("profile", *command, tmp_path / "empty")
        assert said == f"{tmp_path}/empty has no rank*.jsonl of a communication profile"
    assert refusal("profile", "compare", tmp_path / "no", folder).startswith(
        f"{tmp_path}/no is not"
    )


def test_the_only_run_of_a_folder_is_taken(folder: Path, tmp_path: Path) -> None:
    text = printed("profile", "report", tmp_path, "--no-html")
    assert text.endswith(f"written to {folder}: summary.json\n")
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}
    both = profile("compare", tmp_path, folder).stdout.splitlines()
    assert both[0].split(" (")[0] == f"A: {folder}"
    inside = save(folder / "older", PLANTED.run())  # a run itself is none of what is in it
    assert profile("report", folder, "--no-html").stdout.endswith(f"{folder}: summary.json\n")
    assert inside.is_dir()


def test_compare_shows_what_differs(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", replace(PLANTED, forward=220, sent=500_000).run())
    text = printed("profile", "compare", folder, other)
    a, b, verdict, _, *rows = text.splitlines()
    assert a == f"A: {folder} (int8, 2 ranks, 2 nodes, 10 steps)"
    assert b.startswith(f"B: {other} (")
    assert verdict.endswith("longer: forward +200 ms.")
    cells = {row.split()[0]: row.split() for row in rows}
    assert cells["forward"] == [
        *["forward", "45.0", "ms", "245", "ms", "+200", "ms"],
        *["±", "0", "ms", "+444.4", "%"],
    ]
    assert cells["sent"][-2:] == ["-50.0", "%"]
    assert cells["between"][-1] == "ms"
    assert cells["all"][1:4] == ["steps", "210", "ms"]
    assert rows[-1] == (
        "medians over the steps in detail (a report has means), parts as means over ranks; 'all "
        "steps' is over all"
    )


def test_compare_does_not_make_much_of_little(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", replace(PLANTED, transfer=16).run())
    text = printed("profile", "compare", folder, other)
    nothing = "There is no difference beyond the spread of the steps."
    assert nothing in text.splitlines()
    (row,) = [line for line in text.splitlines() if line.lstrip().startswith("exposed transfer")]
    assert row.rstrip().endswith("within the spread")


def test_compare_for_programs(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", replace(PLANTED, steps=4).run())
    text = printed("profile", "compare", folder, other, "--json")
    content = json.loads(text)
    assert (content["b"]["steps"], content["b"]["all_steps"]) == (2, 2)
    assert content["a"]["run"]["codec"] == "int8"
    assert content["verdict"].startswith("The steps cannot be compared")
    step = content["differences"][0]
    assert (step["name"], step["spread"], step["is_explained"]) == ("step_ms", None, None)
    assert step["difference"] == step["b"] - step["a"]


def test_compare_counts_the_steps_that_its_figures_are_of(folder: Path, tmp_path: Path) -> None:
    coarse = bare(PLANTED.run(), range(1, 99, 2), buckets=(), spans=(), detailed=False)
    other = save(tmp_path / "other", coarse)
    content = json.loads(profile("compare", folder, other, "--json").stdout)
    assert (content["a"]["steps"], content["a"]["all_steps"]) == (10, 10)
    assert (content["b"]["steps"], content["b"]["all_steps"]) == (5, 10)
    told = profile("compare", folder, other).stdout.splitlines()[1]
    assert told.endswith("(int8, 2 ranks, 2 nodes, 5 of 10 steps in detail)")


def test_the_commands_load_no_torch(folder: Path) -> None:
    names = ("none", "int8", "int4")
    costs = {name: CodecCost(name, "gather", 1.0, 0.0, 0.0, 0.0) for name in names}
    write_costs(folder, Costs(costs))  # predictions are made too
    commands = [f"profile report {folder} --trace --csv", f"profile compare {folder} {folder}"]
    done = run([sys.executable, "-c", LOADED, *commands], limit=60)
    assert done.require_success().output == "\n"
