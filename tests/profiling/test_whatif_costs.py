"""What codecs cost: measured at the end of a run, kept, and read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import nan
from pathlib import Path

import pytest
import torch
from planted import Planted, replace

from lightning_dist.measurement import calibration
from lightning_dist.measurement.calibration import calibrate, to_measure
from lightning_dist.measurement.costs import CANDIDATES, CodecCost
from lightning_dist.profiling.whatif.costs import (
    NAME,
    Costs,
    Status,
    measure_costs,
    read_costs,
    runs_compiled,
    seconds_of,
    write_costs,
)
from lightning_dist.profiling.whatif.observe import observe

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
            reason=f"{NAME} is damaged or of another version", status=Status.UNREADABLE
        ), text
    for schema in (1, 3):
        (tmp_path / NAME).write_text(json.dumps({**kept, "schema": schema}))
        assert "of another version" in read_costs(tmp_path).reason
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    assert "cannot be read" in read_costs(tmp_path).reason


def test_a_trial_does_not_wait_for_it(calls: list[str]) -> None:
    found = measured(Planted())
    assert found == Costs(reason="the training was shorter than 30 s", status=Status.NOT_MEASURED)
    assert calls == []


def test_the_own_codec_comes_first_and_one_that_fails_is_no_reason_to_end(
    calls: list[str],
) -> None:
    assert seconds_of(LONG.run()) == pytest.approx(40, rel=0.05)
    found = measured(LONG)
    assert calls == ["none", "int8", *(n for n in CANDIDATES if n not in ("none", "int8"))]
    assert set(found.by_name) == {*CANDIDATES} - {"sign"}
    assert found.reason == "measuring sign failed: RuntimeError: no sign"
    assert found.by_name["int8"].source == "on host-a after this run"


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
