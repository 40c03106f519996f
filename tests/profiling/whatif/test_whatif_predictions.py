"""What codecs cost, and predictions in the headline, the summary and the terminal."""

import json
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import Planted, replace
from report_pages import printed
from summaries import a_summary, a_whatif
from whatif_runs import DDP

from lightning_dist.measurement import CANDIDATES, CodecCost, calibration
from lightning_dist.measurement.calibration import calibrate, to_measure
from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.report.files import write_summary
from lightning_dist.profiling.report.tables import whatif_table
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import (
    MEASURES,
    NAME,
    Costs,
    measure_costs,
    read_costs,
    runs_compiled,
    seconds_of,
    with_whatif,
    write_costs,
)
from lightning_dist.profiling.whatif.scenarios import (
    LABEL,
    Predictions,
    headline,
)

COST = CodecCost("int8", "two_shot", 1.02, 1e-9, 5e-10, 1e-9, source="on a", assumption="b")
KEPT = Costs({"int8": COST}, "no time was left")
LONG = Planted(steps=4, forward=10_000)
"""40 s."""
DEVICE = torch.device("cuda", 1)


def measured(planted: Planted, clock: Sequence[float] = (0.0,) * 99) -> Costs:
    run, times = planted.run(), iter(clock)
    return measure_costs(run, observe(run), fused=False, device=DEVICE, clock=lambda: next(times))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were measured, in order; sign cannot be."""
    found: list[str] = []

    def fake(
        names: Sequence[str], *, fused: bool, where: str, device: torch.device
    ) -> dict[str, CodecCost]:
        assert device == DEVICE
        found.extend(names)
        if "sign" in names:
            raise RuntimeError("no sign")
        return {name: replace(COST, name=name, source=where) for name in names}

    monkeypatch.setattr(calibration, "calibrate", fake)
    return found


def test_what_is_kept_is_what_is_read_without_fields_of_a_later_version(tmp_path: Path) -> None:
    write_costs(tmp_path, KEPT)
    assert read_costs(tmp_path) == KEPT
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    content = json.loads((tmp_path / NAME).read_text())
    assert content == {
        "schema": 2,
        "status": "measured",
        "reason": KEPT.reason,
        "costs": {"int8": vars(COST)},
    }
    content["costs"]["int8"]["smell"] = 1
    (tmp_path / NAME).write_text(json.dumps(content))
    assert read_costs(tmp_path) == KEPT


def test_a_file_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    assert "were not measured" in read_costs(tmp_path).reason
    kept = {"schema": 2, "reason": "", "costs": {"int8": vars(COST)}}
    bad = [{"encode": nan}, {"encode": -1}, {"wire": 0}, {"encode": "fast"}, {"name": ["int8"]}]
    bad += [{"exchange": "pigeon"}]
    costs = [None, {"int8": {}}, *({"int8": {**vars(COST), **change}} for change in bad)]
    damaged = [json.dumps({**kept, "costs": each}) for each in costs]
    for text in (*damaged, '{"schema": 1, "co', "[1]", "\xff"):
        (tmp_path / NAME).write_text(text, encoding="latin-1")
        assert read_costs(tmp_path) == Costs(
            reason=f"{NAME} is damaged or of another version", status="unreadable"
        ), text
    for schema in (1, 3):
        (tmp_path / NAME).write_text(json.dumps({**kept, "schema": schema}))
        assert "of another version" in read_costs(tmp_path).reason
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    assert "cannot be read" in read_costs(tmp_path).reason


def test_a_trial_does_not_wait_for_it(calls: list[str]) -> None:
    found = measured(Planted())
    assert found == Costs(reason="the training was shorter than 30 s", status="not measured")
    assert calls == []


def test_the_own_codec_comes_first_and_one_that_fails_is_no_reason_to_end(
    calls: list[str],
) -> None:
    assert seconds_of(LONG.run()) == pytest.approx(40, rel=0.05)
    found = measured(LONG)
    assert calls == ["none", "int8", *(n for n in CANDIDATES if n not in ("none", "int8"))]
    assert set(found.by_name) == {*CANDIDATES} - {"sign"}
    assert found.reason == "measuring sign failed: RuntimeError: no sign"
    assert found.by_name["int8"].source == "on node-a after this run"


def test_it_begins_with_nothing_more_when_its_time_is_over(calls: list[str]) -> None:
    found = measured(LONG, [100.0, 103.9, 104.2])  # a tenth of 40 s
    assert calls == ["none", "int8"]
    assert set(found.by_name) == {"none", "int8"}
    assert found.reason.startswith("no time was left to measure fp16, int4, sign, topk, powersgd")


def test_large_models_have_compiled_kernels_before_anybody_compresses_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = observe(Planted(codec="ddp", encode=0, decode=0).run())
    large = observe(Planted(codec="ddp", encode=0, decode=0, raw=2**23).run())
    (tmp_path / "g++").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [runs_compiled(each) for each in (small, large)] == [False, True]
    assert not runs_compiled(large, False), "compile_kernels=False"
    (tmp_path / "g++").unlink()
    assert not runs_compiled(large), "there is no compiler"


def test_codecs_of_which_nothing_can_be_said_are_left_out() -> None:
    for own in ("threshold", "of another version", "ddp"):
        assert to_measure(["int4"], own) == ["none", "int4"]
    assert to_measure(["int4"], "dgc") == ["none", "dgc", "int4"]
    assert to_measure(["threshold"], "threshold") == ["none", "threshold"]  # asked for: refused


def test_measuring_draws_nothing_from_the_generator() -> None:
    before = torch.random.get_rng_state()
    threads = torch.get_num_threads()
    found = calibrate(["powersgd"], units=4, rounds=1, where="here")
    assert found["powersgd"].source == "measured alone here, not compiled"
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads


NOTHING = "No other setting is predicted to be faster by more than the error of the model."


def cost(name: str, wire: float) -> CodecCost:
    return CodecCost(name, "allreduce", wire, 0.0, 0.0, 0.0, source="here")


COSTS = {"none": cost("none", 4.0), "fp16": cost("fp16", 2.0)}


def told(planted: Planted, costs: Mapping[str, CodecCost] = COSTS) -> Summary:
    run = planted.run()
    return with_whatif(summarize(run), run, lambda observed: Costs(costs))


def with_best(**changes: Any) -> Predictions:
    found = a_whatif()
    return replace(found, scenarios=[replace(found.scenarios[0], **changes), *found.scenarios[2:]])


def test_the_best_comes_after_what_was_measured() -> None:
    before = summarize(DDP.run())
    after = told(DDP)
    # 4 buckets of 40 ms, the first ready after 10 of 40 ms: 130 ms exposed, and with half the
    # bytes 50; the rest of the step takes 67.
    assert after.headline == f"{before.headline} Predicted with fp16: 1.7x."
    assert replace(after, headline=before.headline, predictions=None) == before


def test_where_nothing_is_faster_it_says_so() -> None:
    assert told(DDP, {"none": COSTS["none"]}).headline.endswith(f". {NOTHING}")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"form": "hierarchical"}, "Predicted with int4 between nodes: 1.2x."),
        ({"form": "leader"}, "Predicted with int4 between nodes, leader form: 1.2x."),
        ({"change": -0.019}, NOTHING),
        (
            {"assumption": "matrices", "position": None},
            f"{NOTHING[:-1]}; int4 may be, under its assumption.",
        ),
        ({"change": 0.5}, NOTHING),
        *(
            ({"change": change}, f"Predicted with int4: {factor}.")
            for change, factor in ((-0.474, "1.9x"), (-0.5, "2x"), (-0.84, "6.2x"), (-0.95, "20x"))
        ),
    ],
)
def test_the_headline_names_the_best_setting(changes: dict[str, Any], sentence: str) -> None:
    assert headline(with_best(**changes)) == sentence


def test_a_flat_exchange_is_named_where_the_run_had_another() -> None:
    found = a_whatif()
    found = replace(found, baseline=replace(found.baseline, form="hierarchical"))
    assert headline(found) == "Predicted with int4, flat: 1.2x."


def test_the_headline_has_the_first_of_the_table() -> None:
    costs = {
        "none": COSTS["none"],
        "sign": cost("sign", 0.5),
        "int4": cost("int4", 0.501),  # cannot be told from it, and loses less
        "fp16": COSTS["fp16"],
        "powersgd": replace(cost("powersgd", 0.1), assumption="matrices"),
    }
    summary = told(DDP, costs)
    assert summary.predictions is not None
    names = [each.codec for each in summary.predictions.scenarios if each.step_ms]
    assert names[:3] == ["int4", "sign", "fp16"]
    assert names[-1] == "powersgd"
    positions = {each.codec: each.position for each in summary.predictions.scenarios}
    assert (positions["int4"], positions["sign"], positions["fp16"]) == (1, 1, 3)
    assert positions["powersgd"] is None
    assert " Predicted with int4: " in summary.headline
    rows = [line.split() for line in printed(summary).splitlines()]
    assert ["1", "int4"] in [row[:2] for row in rows]


def test_summary_json_has_all_of_it(tmp_path: Path) -> None:
    summary = told(DDP)
    write_summary(tmp_path / "summary.json", summary)
    content = json.loads((tmp_path / "summary.json").read_text())["predictions"]
    assert summary.predictions is not None
    assert content == json.loads(json.dumps(summary.predictions.as_dict()))
    assert (content["label"], content["schema"]) == (LABEL, 3)
    assert content["error"] == pytest.approx(0, abs=1e-9)
    # the run itself is the first row anyway
    assert "ddp" not in [each["codec"] for each in content["scenarios"]]


@pytest.mark.parametrize(
    ("planted", "costs", "reason"),
    [
        (replace(DDP, world_size=1), COSTS, "one rank exchanges nothing"),
        (DDP, {}, "not today"),
    ],
)
def test_where_nothing_can_be_predicted_there_is_the_reason(
    planted: Planted, costs: Mapping[str, CodecCost], reason: str
) -> None:
    run = planted.run()
    before = summarize(run)
    after = with_whatif(before, run, lambda observed: Costs(costs, "not today"))
    assert after.headline == before.headline
    assert after.as_dict()["predictions"] is None
    assert reason in after.unavailable["predictions"]
    assert f"n/a  {after.unavailable['predictions']}" in " ".join(printed(after).split(" "))
    assert whatif_table(after).missing == f"n/a: {after.unavailable['predictions']}."


def test_a_fault_in_a_prediction_costs_only_the_prediction() -> None:
    def broken(observed: object) -> Costs:
        raise ZeroDivisionError("by nothing")

    run = DDP.run()
    found = with_whatif(summarize(run), run, broken)
    assert (
        found.unavailable["predictions"] == "the prediction failed: ZeroDivisionError: by nothing"
    )


def test_costs_that_were_not_measured_are_reported() -> None:
    run = DDP.run()
    found = with_whatif(summarize(run), run, lambda observed: Costs(COSTS, "no time was left"))
    assert found.predictions is not None
    assert found.predictions.unavailable["costs"] == f"no time was left; {MEASURES}"
    table = whatif_table(found)
    assert f"Costs: n/a, no time was left; {MEASURES}." in table.caption
    assert "N/a for int8 flat, int4 flat, sign flat, topk flat, powersgd flat" not in table.caption
    assert "N/a for int8 flat: the cost of int8 was not measured." in table.caption


def test_each_reason_for_a_missing_prediction_is_reported_once() -> None:
    run = replace(DDP, world_size=4, nodes=("a",)).run()
    found = with_whatif(summarize(run), run, lambda observed: Costs(COSTS))
    table = whatif_table(found)
    assert "4 ranks on 1 node, " in table.caption
    assert "N/a for int8, int4, sign, topk, powersgd flat: " not in table.caption
    assert "N/a for int8 flat, hierarchical, leader: the cost of int8 was not" in table.caption
    assert "N/a for none, fp16 hierarchical, leader: one node: nothing crosses" in table.caption


def test_the_terminal_has_the_best_few() -> None:
    text = printed(a_summary(steps=4))
    assert f"{LABEL}, ms (sent: MB):" in text.splitlines()
    assert "measured 114 ms; error of the simulation -1.9 %" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "int4", "92.0", "22.0", "8.20", "-17.9", "%"] in rows
    assert ["3", "fp8"] in [row[:2] for row in rows]
