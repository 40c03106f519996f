"""CommProfiler where a rank is lost, late or alone, or has no folder; twice, traced by torch."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from comm_profiles import (
    profile,
    profiles,
    require_no_prediction,
    truth,
)

from lightning_dist.profiling.analysis.breakdown import analyse, passes_of
from lightning_dist.profiling.run import read_run

pytestmark = pytest.mark.slow  # jobs of two ranks, one after the other

ENDS = ("lost at the end", "late at the end")
CASES = (
    *ENDS,
    *("hanging", "twice", "traced", "alone", "compiled", "closures", "other hook"),
    *("two at once", "destroyed", "together", "steps in backward"),
    *("no folder", "no folder on one", "own folders"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> dict[str, Path]:
    return profiles(tmp_path_factory.mktemp("profiles"), CASES, python=quick_python)


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
    assert "a rank had terminated or was late at the end, so clocks were not compared" in output
    assert "of the step is exposed communication" in output


def test_a_late_rank_is_not_waited_for_without_end(folders: dict[str, Path]) -> None:
    waited = json.loads((folders["late at the end"] / "truth-0.json").read_text())["seconds"]
    assert waited < 20  # gloo's own patience, in this test: 60


def test_what_would_help_is_not_measured_for_a_short_training(folders: dict[str, Path]) -> None:
    require_no_prediction(folders["twice"], "the training was shorter than 30 s")


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


def test_a_compiled_ddp_has_its_steps_in_detail_and_no_word_of_the_compiler(
    folders: dict[str, Path],
) -> None:
    profiled, summary = profile(folders["compiled"])
    assert profiled.common_steps == list(range(12))
    assert all(step.buckets for step in profiled.ranks[0].steps.values())
    assert all(
        summary["breakdown_ms"][part] > 0 for part in ("forward", "backward", "exposed_transfer")
    )
    for each in truth(folders["compiled"]):
        assert [said for said in each["said"] if "Dynamo" in said] == []
        assert each["model"] == truth(folders["compiled"])[0]["model"]


def test_an_optimizer_with_a_closure_has_one_step_with_all_of_its_exchanges(
    folders: dict[str, Path],
) -> None:
    profiled, summary = profile(folders["closures"])
    asked = truth(folders["closures"])[0]["asked"]
    assert profiled.common_steps == list(range(12))
    steps = profiled.ranks[0].steps.values()
    passes = [len(passes_of(each)) for each in steps]
    assert sum(passes) == asked > 12
    for step, of_step in zip(steps, passes, strict=True):
        exchanges = [span for span in step.spans if span.phase == "exchange"]
        assert len(step.buckets) == len(exchanges)
        assert {each.name for each in step.phases} >= {"forward", "backward", "optimizer"}
        if step.step:  # the first has other buckets, which are built anew after it
            assert sum(each.raw for each in step.buckets) == of_step * 4 * (256 * 256 + 256) * 4
    for step in profiled.common_steps:
        for each in analyse(profiled, step):
            assert sum(each.parts.values()) == each.duration
            assert each.ns["exposed"] > 0
    (note,) = (note for note in summary["notes"] if "gradients are exchanged" in note)
    assert "passes that only accumulate gradients need no exchange" in note
    assert "exchange gradients several times" in summary["unavailable"]["predictions"] or (
        "shorter than 30 s" in summary["unavailable"]["predictions"]
    )


def test_a_model_is_profiled_once_at_a_time(folders: dict[str, Path]) -> None:
    for each in truth(folders["two at once"]):
        assert each["said"].startswith("This model is profiled already, and one CommProfiler")
        assert not each["made"]
    profiled, summary = profile(folders["two at once"])
    assert profiled.common_steps == list(range(12))
    assert summary["traffic"]["wire_bytes"] > 0


def test_a_process_group_that_is_gone_costs_the_last_comparison_of_clocks(
    folders: dict[str, Path],
) -> None:
    profiled, _ = profile(folders["destroyed"])
    assert profiled.common_steps == list(range(12))
    assert all(each.end.reason == "finished" for each in profiled.ranks.values())
    output = (folders["destroyed"] / "output-1.txt").read_text()
    assert "the process group was destroyed before the profile was over" in output


def test_lines_of_ranks_that_fail_together_are_waited_for(folders: dict[str, Path]) -> None:
    _, summary = profile(folders["together"])
    assert "Partial data" not in summary["headline"]
    assert summary["notes"][0] == "the training ended by ArithmeticError: the loss is odd"
    assert summary["steps"] == 6


def test_the_hook_of_optimizers_that_step_in_the_backward_pass_is_left_to_ddp(
    folders: dict[str, Path],
) -> None:
    output = (folders["steps in backward"] / "output-0.txt").read_text()
    assert "buckets: n/a, optimizers step in the backward pass" in output


def test_torch_traces_steps_that_are_left_out(folders: dict[str, Path]) -> None:
    for number, (first, steps) in enumerate([(3, {3, 4, 5}), (4, {4, 5, 6, 7})]):
        profiled, _ = profile(folders["traced"], number)
        assert set(range(12)) - set(profiled.common_steps) == steps
        for rank in range(2):
            name = f"torch-trace-rank{rank}-step{first}.json.gz"
            with gzip.open(folders["traced"] / f"run-{number}" / name) as trace:
                names = {event.get("name", "") for event in json.load(trace)["traceEvents"]}
            assert any("AddmmBackward" in name for name in names)
    assert all(each["usual"] for each in truth(folders["traced"]))


def test_a_run_that_ends_within_a_trace_leaves_its_steps_out(folders: dict[str, Path]) -> None:
    for number, (kept, traces) in enumerate([([0, 1, 2], 2), ([0, 1, 2, 3], 0)]):
        profiled, _ = profile(folders["traced"] / "short", number)
        assert profiled.common_steps == kept
        found = list((folders["traced"] / "short" / f"run-{number}").glob("torch-trace-*"))
        assert len(found) == traces


def test_one_rank_has_nothing_to_exchange(folders: dict[str, Path]) -> None:
    _, summary = profile(folders["alone"] / "0")
    assert summary["traffic"] is None
    assert summary["unavailable"]["traffic"] == "one rank sends nothing"
    assert summary["step_ms"]["mean"] > 0


def test_what_is_not_measured_has_its_reason(folders: dict[str, Path]) -> None:
    output = (folders["other hook"] / "output-0.txt").read_text()
    assert "buckets: n/a, the model has a communication hook already (fp16_compress_hook)" in output
    _, summary = profile(folders["other hook"])
    assert summary["traffic"] is None
    assert summary["notes"][0].startswith(
        "buckets: n/a, the model has a communication hook already"
    )
    for name in ("buckets", "exposed_codec", "exposed_ms", "errors"):
        assert "fp16_compress_hook" in summary["unavailable"][name]
    assert not any("gradients of ddp" in note for note in summary["notes"])
    assert summary["unavailable"]["traffic"]
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
    told = "CommProfiler, rank 1: profiles/run-0: Not a directory; steps of this rank are not"
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


def test_how_to_copy_lines_of_other_disks_is_said_where_the_training_fails(
    folders: dict[str, Path],
) -> None:
    for rank in range(2):
        output = (folders["own folders"] / f"output-{rank}.txt").read_text()
        assert "were not gathered; copy rank1.jsonl of" in output
        assert "into failed/run-0 of" in output
        assert "lightning-dist profile report failed/run-0" in output
