"""A fixed part of the campaign of faults in trainings that recover within their processes."""

import json
import shlex
from pathlib import Path

import pytest
from needs import needs
from processes import run

from lightning_dist.base.features import RECOVERY
from tests.campaigns.in_process.drawing import KINDS, Strike, draw
from tests.campaigns.in_process.oracle import PROBLEMS, Verdict, judge


@needs(RECOVERY)
@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("adapter", "drawn", "codecs"),
    [
        ("loop", "--trials 10 --seed 5", ["none", "int8"]),
        ("trainer", "--trials 15 --seed 5", ["none", "int8"]),
        ("local_steps", "--trials 20 --seed 5", ["none", "int8"]),
        pytest.param(
            *("loop", "--trials 20 --seed 6", ["none", "int8"]), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            *("trainer", "--trials 15 --seed 6", ["none", "int8"]), marks=pytest.mark.exhaustive
        ),
        # A newcomer joins where a step of several micro-batches is repeated.
        pytest.param(
            *("trainer", "--trials 60 --seed 12 --number 1", ["int8"]),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_nothing_is_lost_in_a_small_campaign(
    adapter: str, drawn: str, codecs: list[str], tmp_path: Path, quick_python: list[str]
) -> None:
    result = tmp_path / "campaign.json"
    words = ["--adapter", adapter, *drawn.split(), "--beat-timeout", "8"]
    words += ["--python", shlex.join(quick_python)]
    command = [*quick_python, "-m", "tests.campaigns.in_process", *words]
    done = run([*command, "--folder", tmp_path, "--json", result], limit=350)
    rows = json.loads(result.read_text())["rows"] if result.exists() else []
    found = [row["problems"] for row in rows]
    assert done.returncode == 0, (found, done.output[-3000:])
    assert [row["kind"] for row in rows] == codecs
    for row in rows:
        assert {name: row[name] for name in PROBLEMS} == dict.fromkeys(PROBLEMS, 0)
        missed = {kind for kind, struck, drawn in row["kinds"] if struck < drawn}
        # The worker of that place may be lost in the last step of its epoch, to another fault.
        assert missed <= {"end of an epoch"}
        assert row["faults"] - row["struck"] <= len(missed)


def test_a_straggler_that_is_evicted_is_a_problem(tmp_path: Path) -> None:
    """A worker that was stopped for good may be."""
    actions = {"0.0.0": "pause", "0.1.0": "pause", "0.2.0": "stop"}
    said = "generation 1: 2 workers at step 3 (worker {} was lost: no heartbeat for 5.1 s)\n"
    (tmp_path / "output.txt").write_text(said.format("0.1.0") + said.format("0.2.0"))
    strikes = []
    for number, (name, action) in enumerate(actions.items()):
        strikes.append(Strike(number, number, "straggler", 0, number, "forward", action))
        (tmp_path / f"struck-{number}").write_text(name)
    verdict = Verdict("int8", 0)
    judge(verdict, tmp_path, strikes, codec="int8", spared=None)
    assert ("evicted", "stragglers: ['0.1.0']") in verdict.problems


def test_faults_of_all_kinds_are_drawn_and_the_first_and_last_steps_are_struck() -> None:
    strikes, steps = draw(200, seed=1, spared=3)
    assert {each.kind for each in strikes} == {*KINDS}
    assert (strikes[0].step, strikes[-1].step) == (0, steps - 1)
    assert all(each.local_rank != 3 for each in strikes)
    assert [each.number for each in strikes] == [*range(len(strikes))]
    assert draw(200, seed=1, spared=3) == (strikes, steps)
