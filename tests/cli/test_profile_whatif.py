"""``lightning-dist profile whatif``."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import printed, profile, refusal, save
from planted import Planted, replace

from lightning_dist.measurement import CodecCost, calibration
from lightning_dist.profiling.whatif.predict import Costs, write_costs

DDP = Planted(steps=8, codec="ddp", encode=0, decode=0, sent=4_000_000, transfer=40)
FP16 = CodecCost("fp16", "allreduce", 2.0, 0.0, 0.0, 0.0, source="on a after this run")
KEPT = Costs({"fp16": FP16, "none": replace(FP16, name="none")})
CHANGE_BASELINE = "change: against ddp flat with the same link and nodes"


@pytest.fixture(autouse=True)
def _measured_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a megabyte of gradients: what codecs cost is no matter here."""
    monkeypatch.setattr(calibration, "_UNITS", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "run", DDP.run())


def content(*arguments: str | Path) -> dict[str, Any]:
    text = printed("profile", "whatif", *arguments, "--json")
    found: dict[str, Any] = json.loads(text)
    return found


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.split()[:1] in (["1"], ["2"])]


def test_the_run_and_the_error_come_first(folder: Path) -> None:
    text = printed("profile", "whatif", folder, "--codec", "ddp", "--codec", "fp16")
    measured, label, columns, own, best, other, *notes = text.splitlines()
    assert measured == (
        "Measured: 197 ms a step (ddp, 2 ranks on 2 nodes, 836 Mbit/s between them)."
    )
    assert (
        label == "Predicted step time (simulated), 2 ranks on 2 nodes, 836 Mbit/s between them, "
        "ms (sent: MB):"
    )
    assert "setting" in columns.split()
    assert own.split()[:4] == ["ddp", "(this", "run)", "197"]
    assert [row.split()[:2] for row in (best, other)] == [["1", "fp16"], ["2", "ddp"]]
    assert "no difference from this run within the error" in other
    assert re.fullmatch(
        r"note: this run simulated: 197 ms \([+-]?0\.0 %\); differences within 2 % are not "
        r"ranked",
        notes[0],
    )
    assert notes[1] == f"note: {CHANGE_BASELINE}"
    here = "note: codec costs: fp16 measured alone on this machine now, not compiled"
    assert here in notes
    assert any(note.startswith("note: latency: n/a, ") for note in notes)


def test_json_and_nothing_else(folder: Path) -> None:
    found = content(folder, "--link-gbps", "0.05", "--nodes", "4", "--codec", "ddp")
    assert (found["schema"], found["label"]) == (3, "Predicted step time (simulated)")
    assert found["error"] == pytest.approx(0, abs=1e-9)
    assert found["baseline"]["step_ms"] == pytest.approx(found["measured_ms"])
    (only,) = found["scenarios"]
    assert (only["codec"], only["nodes"], only["gbps"]) == ("ddp", 4, pytest.approx(0.05))
    # 16 MB, three halves of it between four, and the link is slower than the measured 100 MB/s
    assert only["exposed_ms"] == pytest.approx(24e6 / (50e6 / 8 * 1448 / 1514) * 1e3 - 30)


def test_all_codecs_measured_here_by_default(folder: Path) -> None:
    found = content(folder)["scenarios"]
    assert {each["codec"] for each in found} == {
        *("ddp", "none", "fp16", "int8", "int4", "sign", "topk", "powersgd")
    }
    assert all(each["step_ms"] > 0 for each in found)
    assert ["matrices" in each["assumption"] for each in found].count(True) == 1


REFUSALS = {
    "--nodes 1": "nodes must be 2 or more",
    "--link-gbps 0": "link_gbps must be above 0 Gbit/s, got 0",
    "--inside-gbps nan": "inside_gbps must be above 0 Gbit/s, got nan",
    "--latency-us -1": "latency_us must be 0 or more, got -1",
    "--form ring": "form must be one of flat, hierarchical, leader",
    "--codec int9": "codec must be one of",
    "--codec int8 --codec threshold": "codec must have a size that does not depend on the grad",
    "--codec ddp --form leader": "Nothing of this can be predicted: DDP itself is not hierarchical",
    "--codec int8 --form hierarchical --link-gbps 1": (
        "Nothing of this can be predicted: one rank per node: nothing is reduced"
    ),
}


@pytest.mark.parametrize("arguments", REFUSALS)
def test_a_refusal_comes_before_anything_is_measured(
    arguments: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(calibration, "_cost", lambda name, *_, **__: measured.append(name))
    assert refusal("profile", "whatif", folder, *arguments.split()).startswith(REFUSALS[arguments])
    assert measured == []


def test_a_profile_of_one_rank_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "alone", replace(DDP, world_size=1).run())
    assert "one rank exchanges nothing" in refusal("profile", "whatif", folder)


def test_a_run_whose_codec_cannot_be_measured(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", replace(DDP, codec="threshold", encode=1, decode=1).run())
    said = refusal("profile", "whatif", folder, "--codec", "fp16")
    assert said == "This run cannot be simulated: the cost of threshold was not measured"


def test_what_the_run_has_measured_is_taken_and_the_rest_is_measured_here(folder: Path) -> None:
    write_costs(folder, Costs({"fp16": FP16}))
    # the only run of a folder is taken
    kept = profile("whatif", folder.parent, "--codec", "fp16", "--codec", "bf16").stdout
    here = "measured alone on this machine now, not compiled"
    assert f"note: codec costs: fp16 on a after this run; bf16 {here}\n" in kept
    anew = profile("whatif", folder, "--codec", "fp16", "--measure").stdout
    assert f"note: codec costs: fp16 {here}\n" in anew
    (folder / "costs.json").write_text("{")
    damaged = profile("whatif", folder, "--codec", "fp16")
    assert damaged.exit_code == 0
    assert damaged.stderr == "costs.json is damaged or of another version; measured here instead\n"


def test_what_codecs_cost_on_a_gpu_is_not_measured_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = save(tmp_path / "run", replace(DDP, device="cuda").run())
    asked = ("whatif", folder, "--codec", "ddp", "--codec", "fp16", "--codec", "int8")
    none = profile(*asked)
    assert none.exit_code == 0
    assert none.stderr == (
        "no cuda here to measure codecs on: codec costs were not measured, so all but ddp is n/a\n"
    )
    assert "note: n/a for fp16 flat: the cost of fp16 was not measured" in none.stdout
    write_costs(folder, Costs({"fp16": FP16}))
    kept = profile(*asked, "--json")
    assert kept.stderr == (
        "no cuda here to measure codecs on: codecs that the run has not measured are n/a\n"
    )
    steps = {each["codec"]: each["step_ms"] for each in json.loads(kept.stdout)["scenarios"]}
    assert steps["fp16"] < steps["ddp"]
    assert steps["int8"] is None
    for option in ("--measure", "--compiled"):
        said = refusal("profile", *asked, option)
        assert "need a device like that of the run, cuda, and none is available here" in said


def test_of_another_link_the_change_is_against_the_runs_own_setting_there(folder: Path) -> None:
    write_costs(folder, KEPT)
    asked = (folder, "--codec", "fp16", "--link-gbps", "0.1")
    text = profile("whatif", *asked).stdout
    best, own = rows(text)
    assert (best[:2], own[:2]) == (["1", "fp16"], ["2", "ddp"])
    change = best.index("%") - 1
    assert re.fullmatch(r"-4\d\.\d", best[change])
    assert own[change] in ("+0.0", "0.0")
    assert f"note: {CHANGE_BASELINE}" in text
    assert "2 ranks on 2 nodes, 100 Mbit/s between them, ms (sent: MB):" in text
    found = content(*asked)
    assert [each["change"] < 0 for each in found["scenarios"]] == [True, False]


def test_one_host_predicts_nothing_for_several_without_a_rate_between_them(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", replace(DDP, nodes=("a",)).run())
    write_costs(folder, KEPT)
    first, *_ = profile("whatif", folder, "--codec", "ddp").stdout.splitlines()
    assert "(ddp, 2 ranks on 1 node, 836 Mbit/s per rank inside the node)" in first
    given = profile("whatif", folder, "--codec", "ddp", "--link-gbps", "0.1").stdout.splitlines()
    assert given[0] == first
    assert "2 ranks on 1 node, each with a link of 100 Mbit/s, ms (sent: MB):" in given[1]
    asked = ["--codec", "ddp", "--codec", "fp16", "--nodes", "64"]
    for more in ([], ["--json"]):
        assert refusal("profile", "whatif", folder, *asked, *more) == (
            "The run was on one node; give the rate of a link between nodes with --link-gbps"
        )
    found = content(folder, *asked, "--link-gbps", "10")["scenarios"]
    assert {(each["codec"], each["nodes"]) for each in found} == {("ddp", 64), ("fp16", 64)}


def test_what_alone_cannot_be_predicted_is_a_note_with_the_option(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", replace(DDP, world_size=4).run())
    write_costs(folder, KEPT)
    text = printed("profile", "whatif", folder, "--codec", "fp16")
    assert "note: n/a for fp16 hierarchical, leader: no exchange inside a node" in text
    assert "with --inside-gbps" in text


def test_a_report_reads_what_the_run_has_measured(folder: Path) -> None:
    none = profile("report", folder, "--no-html").stdout
    assert "codec costs were not measured; `lightning-dist profile whatif DIR`" in none
    write_costs(folder, Costs({"fp16": FP16}))
    told = profile("report", folder, "--no-html").stdout
    assert told.splitlines()[0].endswith(" Predicted with fp16: 1.7x.")
    found = json.loads((folder / "summary.json").read_text())
    assert found["predictions"]["scenarios"][0]["source"] == "on a after this run"


def test_local_steps_are_said_for_every_codec(folder: Path) -> None:
    write_costs(folder, KEPT)
    asked = [folder, "--codec", "fp16", "--local-steps", "16", "--below", "5"]
    text = printed("profile", "whatif", *asked)
    assert re.search(r"fp16 every 16 steps .* waits 6\.9 % of the time", text)
    assert re.search(r"fp16 every 23 steps .* waits 4\.9 % of the time", text)
    local = [each for each in content(*asked)["scenarios"] if each["sync_every"]]
    assert [each["sync_every"] for each in local] == [23, 16]


def test_local_steps_in_fragments_that_overlap(folder: Path) -> None:
    write_costs(folder, KEPT)
    asked = ["--codec", "fp16", "--local-steps", "16", "--fragments", "2", "--overlap-steps", "1"]
    text = printed("profile", "whatif", folder, *asked)
    name = "fp16 every 16 steps in 2 fragments with 1 step overlap"
    assert name in " ".join(text.split())
