"""``lightning-dist profile whatif``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from planted import Planted, replace
from profile_calls import profile, refusal, save

from lightning_dist.cli.profile_whatif import gbps_of
from lightning_dist.profiling.whatif.costs_file import Costs, write_costs
from lightning_dist.reducer import calibration
from lightning_dist.reducer.costs import CodecCost

DDP = Planted(steps=8, codec="ddp", encode=0, decode=0, sent=4_000_000, transfer=40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "run", DDP.run())


def test_the_run_and_the_error_come_first(folder: Path) -> None:
    result = profile("whatif", folder, "--codec", "ddp", "--codec", "fp16")
    assert (result.exit_code, result.stderr) == (0, "")
    measured, error, label, columns, best, other, *notes = result.stdout.splitlines()
    assert measured == "Measured: 197.0 ms a step (ddp, flat, 2 hosts, 0.836 Gbit/s)."
    assert re.fullmatch(
        r"The model says 197\.0 ms of it, [+-]0\.0 %\. Steps within 2\.0 % are not told apart\.",
        error,
    )
    assert label == "PREDICTION, not measured:"
    assert columns.split()[:2] == ["codec", "form"]
    assert best.split()[:4] == ["1", "fp16", "flat", "2"]
    assert other.split()[:4] == ["2", "ddp", "flat", "2"]
    assert "no difference that the model could tell" in other
    assert "note: what fp16 cost: not compiled, on this machine" in notes
    assert any(note.startswith("note: latency: n/a, ") for note in notes)


def test_json_and_nothing_else(folder: Path) -> None:
    result = profile(
        "whatif", folder, "--json", "--bandwidth", "50mbit", "--hosts", "4", "--codec", "ddp"
    )
    assert (result.exit_code, result.stderr) == (0, "")
    content = json.loads(result.stdout)
    assert content["schema"] == 1
    assert content["label"] == "PREDICTION, not measured"
    assert content["error"] == pytest.approx(0, abs=1e-9)
    assert content["current"]["step_ms"] == pytest.approx(content["measured_ms"])
    (only,) = content["others"]
    assert (only["codec"], only["hosts"]) == ("ddp", 4)
    assert only["gbps"] == pytest.approx(0.05)
    # 16 MB, three halves of it between four, and the link is slower than the measured 100 MB/s
    assert only["exposed_ms"] == pytest.approx(24e6 / (50e6 / 8 * 1448 / 1514) * 1e3 - 30)


def test_a_run_on_one_host_has_no_network(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", replace(DDP, hosts=("a",)).run())
    first, *_ = profile("whatif", folder, "--codec", "ddp").stdout.splitlines()
    assert "(ddp, flat, 1 host, 0.836 Gbit/s of a rank, which is loopback or shared mem" in first


def test_all_candidates_by_default(folder: Path) -> None:
    content = json.loads(profile("whatif", folder, "--json").stdout)
    assert {each["codec"] for each in content["others"]} == {
        *("ddp", "none", "fp16", "int8", "int4", "sign", "topk", "powersgd")
    }
    assert all(each["step_ms"] > 0 for each in content["others"])
    assert ["matrices" in each["assumes"] for each in content["others"]].count(True) == 1


@pytest.mark.parametrize(
    ("spelling", "gbps"),
    [
        ("100mbit", 0.1),
        ("1gb/s", 1),
        ("1Gb/s", 1),
        ("1 Gbit/s", 1),
        ("1GBIT", 1),
        ("2.5gbps", 2.5),
        ("1Gbps", 1),
        ("9.4 Gbits/sec", 9.4),
        ("800Kbit/s", 8e-4),
        ("1GB/s", 8),
        ("1GBps", 8),
        ("125MB/s", 1),
        ("125mB/S", 1),
        ("125 megabytes", None),
        ("125 Mbytes/s", 1),
        ("125", None),
        ("10G", None),
        ("0gbit", None),
    ],
)
def test_rates_are_bits_unless_they_are_bytes(spelling: str, gbps: float | None) -> None:
    if gbps is None:
        with pytest.raises(ValueError, match="--bandwidth must be a rate above 0 in bits, like"):
            gbps_of(spelling, option="--bandwidth")
    else:
        assert gbps_of(spelling, option="--bandwidth") == pytest.approx(gbps)


def test_a_rate_that_is_read_both_ways_is_refused(folder: Path) -> None:
    assert refusal("whatif", folder, "--bandwidth", "1GBPS") == (
        "--bandwidth='1GBPS' may be of bits or of bytes; write 1gbit or 1GB/s"
    )


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--bandwidth", "100"], "--bandwidth must be a rate above 0"),
        (["--hosts", "16x8"], "--hosts must be numbers of hosts, like 8 or 2,8,64; got '16x8'"),
        (["--inside", "0gbit"], "--inside must be a rate above 0"),
        (["--hosts", "1"], "--hosts must be 2 or more"),
        (["--bucket-mb", "0"], "--bucket-mb must be above 0 MB, got 0"),
        (["--form", "ring"], "--form must be one of flat, sharded, leader"),
        (["--codec", "int9"], "--codec must be one of"),
        (["--codec", "threshold"], "--codec must have a size that does not depend on the gradient"),
        (
            ["--was", "100mbit"],
            "--was 100mbit is the rate of the run's own link, beside which --bandwidth is another; "
            "give --bandwidth too, or leave --was out",
        ),
        (
            ["--bandwidth", "1gbit", "--was", "1mbit"],
            "--was 1mbit is less than the 0.836 Gbit/s that the run had of that link",
        ),
        (["--latency-us", "-1"], "--latency-us must be 0 µs or more, got -1"),
        (["--latency-us", "nan"], "--latency-us must be 0 µs or more, got nan"),
        (
            ["--codec", "ddp", "--form", "leader"],
            "nothing of this can be predicted: DDP itself knows no hosts",
        ),
        (
            ["--codec", "int8", "--form", "sharded", "--bandwidth", "1gbit"],
            "nothing of this can be predicted: one rank per host: there is nothing to add up",
        ),
    ],
)
def test_refusals(folder: Path, arguments: list[str], rule: str) -> None:
    assert refusal("whatif", folder, *arguments).startswith(rule)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--form", "ring"],
        ["--hosts", "1"],
        ["--codec", "int8", "--codec", "threshold"],
        ["--codec", "int8", "--form", "leader"],
    ],
    ids=" ".join,
)
def test_nothing_is_measured_before_a_refusal(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(calibration, "_cost", lambda name, *_, **__: measured.append(name))
    refusal("whatif", folder, *arguments)
    assert measured == []


def test_a_run_whose_codec_cannot_be_measured(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", replace(DDP, codec="threshold", encode=1, decode=1).run())
    content = json.loads(profile("whatif", folder, "--json", "--codec", "fp16").stdout)
    assert content["current"]["reason"] == "what threshold costs was not measured"
    (other,) = content["others"]
    assert other["step_ms"] > 0
    assert other["verdict"] == "the model has no error to be judged by"


def test_what_the_run_has_measured_is_taken_and_the_rest_is_measured_here(folder: Path) -> None:
    fp16 = CodecCost("fp16", "allreduce", 2.0, 0.0, 0.0, 0.0, source="on a after this run")
    write_costs(folder, Costs({"fp16": fp16}))
    kept = profile("whatif", folder, "--codec", "fp16", "--codec", "bf16").stdout
    assert "note: what fp16 cost: on a after this run" in kept
    assert "note: what bf16 cost: not compiled, on this machine" in kept
    anew = profile("whatif", folder, "--codec", "fp16", "--measure").stdout
    assert "note: what fp16 cost: not compiled, on this machine" in anew


def test_what_codecs_cost_on_a_gpu_is_not_measured_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = save(tmp_path / "run", replace(DDP, device="cuda").run())
    asked = ("whatif", folder, "--codec", "ddp", "--codec", "fp16", "--codec", "int8")
    none = profile(*asked)
    assert none.exit_code == 0
    assert none.stderr == (
        "no cuda here to measure codecs on: what codecs cost was not measured, so all but ddp is "
        "n/a\n"
    )
    assert "note: n/a for fp16 flat: what fp16 costs was not measured" in none.stdout
    fp16 = CodecCost("fp16", "allreduce", 2.0, 0.0, 0.0, 0.0, source="on a after this run")
    write_costs(folder, Costs({"fp16": fp16}))
    kept = profile(*asked, "--json")
    assert kept.stderr == (
        "no cuda here to measure codecs on: codecs that the run has not measured are n/a\n"
    )
    steps = {each["codec"]: each["step_ms"] for each in json.loads(kept.stdout)["others"]}
    assert steps["fp16"] < steps["ddp"]
    assert steps["int8"] is None
    for option in ("--measure", "--compiled"):
        said = refusal(*asked, option)
        assert "need a device like that of the run, cuda, and there is none here" in said


def test_a_file_of_costs_that_cannot_be_used_is_not_passed_over_silently(folder: Path) -> None:
    (folder / "costs.json").write_text("{")
    result = profile("whatif", folder, "--codec", "fp16")
    assert result.exit_code == 0
    assert result.stderr == "costs.json is damaged; measured here instead\n"


def test_other_buckets(folder: Path) -> None:
    content = json.loads(profile("whatif", folder, "--json").stdout)
    own = [each for each in content["others"] if each["codec"] == "ddp"]
    # 16 MB in all: 100 is the same bucket as 25
    assert sorted(each["bucket_mb"] or 0 for each in own) == [0, 5, 25]
    assert {each["bucket_mb"] for each in content["others"] if each not in own} == {None}
    asked = profile("whatif", folder, "--bucket-mb", "10", "--bucket-mb", "2", "--codec", "ddp")
    rows = [line.split() for line in asked.stdout.splitlines()]
    assert [row[1:5] for row in rows if row[1:2] == ["ddp"]] == [
        ["ddp", "flat", "2", "MB"],
        ["ddp", "flat", "10", "MB"],
    ]


def test_hosts_in_one_list_or_several_are_told_from_few_to_many(folder: Path) -> None:
    many = ",".join(str(2**power) for power in range(10, 0, -1))
    asked = ["--codec", "ddp", "--codec", "fp16", "--latency-us", "50"]
    result = profile("whatif", folder, *asked, "--hosts", many, "--hosts", "8", "--hosts", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "PREDICTION, not measured:" in lines
    rows = [line.split() for line in lines if line.split()[2:3] == ["flat"]]
    assert [int(row[3]) for row in rows] == sorted(2 * [3, *(2**power for power in range(1, 11))])
    assert {row[0] for row in rows[::2]} == {"1"}  # a place is among as many hosts
    own = "note: change: against ddp flat, as in this run, with the same link and hosts"
    assert any(line.startswith(own) for line in lines)


def test_of_another_link_the_change_is_against_the_runs_own_setting_there(folder: Path) -> None:
    asked = ["--codec", "fp16", "--bandwidth", "100mbit"]
    text = profile("whatif", folder, *asked).stdout
    best, own = [line for line in text.splitlines() if line.split()[2:3] == ["flat"]]
    assert best.split()[:2] == ["1", "fp16"]
    assert re.search(r" -4\d\.\d %$", best.rstrip())
    assert own.split()[:2] == ["2", "ddp"]
    assert " +0.0 %" in own or " 0.0 %" in own
    assert "note: change: against ddp flat, as in this run, with the same link and hosts" in text
    content = json.loads(profile("whatif", folder, *asked, "--json").stdout)
    assert [each["change"] < 0 for each in content["others"]] == [True, False]
    assert content["against"] == "ddp flat, as in this run, with the same link and hosts"
    usual = profile("whatif", folder, "--codec", "fp16").stdout
    assert "change: against" not in usual


def test_of_one_host_nothing_is_told_of_several_without_a_rate_between_them(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", replace(DDP, hosts=("a",)).run())
    asked = ["--codec", "ddp", "--codec", "int8", "--hosts", "2,8,64,1024"]
    for more in ([], ["--json"]):
        assert refusal("whatif", folder, *asked, *more) == (
            "nothing of this can be predicted: the run was on one host; give the rate of a link "
            "between hosts with --bandwidth"
        )
    assert profile("whatif", folder, *asked, "--bandwidth", "10gbit").exit_code == 0


def test_what_alone_cannot_be_told_is_a_note_with_the_option(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", replace(DDP, world_size=4).run())
    result = profile("whatif", folder, "--codec", "fp16")
    assert result.exit_code == 0
    assert "note: n/a for fp16 sharded or leader: no exchange inside a host" in result.stdout
    assert "with --inside" in result.stdout


def test_the_only_run_of_a_folder_is_taken(folder: Path) -> None:
    fp16 = CodecCost("fp16", "allreduce", 2.0, 0.0, 0.0, 0.0, source="on a after this run")
    write_costs(folder, Costs({"fp16": fp16, "none": replace(fp16, name="none")}))
    result = profile("whatif", folder.parent, "--codec", "fp16")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "note: what fp16 cost: on a after this run" in result.stdout


def test_a_report_reads_what_the_run_has_measured(folder: Path) -> None:
    none = profile("report", folder, "--no-html").stdout
    assert "what codecs cost was not measured; `lightning-dist profile whatif DIR`" in none
    fp16 = CodecCost("fp16", "allreduce", 2.0, 0.0, 0.0, 0.0, source="on a after this run")
    write_costs(folder, Costs({"fp16": fp16}))
    told = profile("report", folder, "--no-html").stdout
    assert told.splitlines()[0].endswith(" Predicted with fp16: 1.7x.")
    content = json.loads((folder / "summary.json").read_text())
    assert content["whatif"]["others"][0]["source"] == "on a after this run"


def test_a_run_with_a_codec_that_cannot_be_measured_is_still_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "sparse", replace(DDP, codec="threshold").run())
    result = profile("whatif", folder, "--codec", "fp16")
    assert result.exit_code == 0
    assert "The model says nothing of the run itself: what threshold costs" in result.stdout


def test_a_profile_of_one_rank_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "alone", replace(DDP, world_size=1).run())
    assert "one rank exchanges nothing" in refusal("whatif", folder)
