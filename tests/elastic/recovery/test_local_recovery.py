"""Loops in local steps whose workers are killed: the others go on with their weights."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from needs import needs
from recovering_jobs import LoopJob
from recovering_loops import EPOCHS, SIZE, Net

from lightning_dist.base.features import RECOVERY
from tests.campaigns.in_process.twin import are_close, replay
from tests.elastic.recovery.recovering_local_steps import SETTINGS

SHARE = 4
"""Samples of a worker in a step of all."""

pytestmark = [needs(RECOVERY), pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.ranks(3)]


class LocalJob(LoopJob):
    """Three workers in local steps of which the third one exchanges."""

    script = Path(__file__).with_name("recovering_local_steps.py")

    @property
    def steps(self) -> int:
        return EPOCHS * -(-SIZE // (SHARE * self.ranks))

    def require_samples(self, *, lost: Sequence[str] = ()) -> None:
        """Each is used at most once in an epoch; those that ``lost`` workers died with are missing:
        of the steps that others have taken in the same generation.
        """
        missing = 0
        for epoch in range(EPOCHS):
            lines = [line for line in self.of("batch") if line["epoch"] == epoch]
            ids = [index for line in lines for index in line["ids"]]
            assert len(ids) == len({*ids})
            missing += SIZE - len(ids)
        expected = 0
        for name in lost:
            ended = max(line["batch"] for line in self.lines[name] if "batch" in line)
            taken = [line["taken"] for line in self.of("taken") if line["generation"] == 0]
            expected += SHARE * (max(taken) - ended)
        assert missing == expected

    def require_equal(self) -> None:
        ends = self.of("end")
        assert len(ends) == self.ranks
        assert {line["end"] for line in ends} == {self.steps}
        assert len({line["hash"] for line in ends}) == 1

    def require_twin(self) -> None:
        """Weights are those of workers that were computed one after the other, in one process."""
        anchor = replay(self.lines, self.folder, settings=SETTINGS, size=SIZE, last=self.steps)
        for path in self.folder.glob("weights-*.pt"):
            saved = torch.load(path)
            assert are_close([saved[key] for key, _ in Net().named_parameters()], anchor)


def test_without_a_fault_it_is_local_steps(tmp_path: Path, quick_python: list[str]) -> None:
    job = LocalJob(tmp_path, quick_python)
    job.require_samples()
    job.require_equal()
    job.require_twin()


@pytest.mark.parametrize("victim", ["0.0.0", "0.1.0", "0.2.0"])
@pytest.mark.parametrize(
    ("place", "step"),
    [
        *[("forward", step) for step in (6, 7, 8)],
        *[(f"call {call}", 8) for call in (1, 2, 3)],  # statistics, weights, and the vote
        *[("after the step", step) for step in (7, 8)],
        ("saving", 7),
    ],
)
def test_a_killed_worker_is_left_out_of_the_mean(
    place: str, step: int, victim: str, tmp_path: Path, quick_python: list[str]
) -> None:
    job = LocalJob(tmp_path, quick_python, faults=[[victim, place, step]], joins=10)
    assert f"worker {victim} exited: SIGKILL" in job.output
    job.require_samples(lost=[victim])
    job.require_equal()
    job.require_twin()
    joined = f"{victim[:-1]}1"
    assert job.lines[joined][0]["joins"] in (9, 12)  # after an outer step
    assert job.metrics()["elastic/restarts"] == 0


def test_a_worker_that_has_not_heard_the_vote_takes_the_outer_step_too(
    tmp_path: Path, quick_python: list[str]
) -> None:
    told = {"faults": [["0.0.0", "after the step", 8]], "lost": [["0.1.0", 8, "0.2.0", 3]]}
    job = LocalJob(tmp_path, quick_python, joins=10, **told)
    job.require_samples(lost=["0.0.0"])
    job.require_equal()
    job.require_twin()
    assert {line["workers"] for line in job.of("outer") if line["outer"] == 3} == {3.0}


def test_under_fabric(tmp_path: Path, quick_python: list[str]) -> None:
    told = {"faults": [["0.0.0", "call 3", 8]], "joins": 10, "fabric": True}
    job = LocalJob(tmp_path, quick_python, **told)
    job.require_samples(lost=["0.0.0"])
    job.require_equal()
    job.require_twin()
    ranks = {line["taken"]: line["ranks"] for line in job.lines["0.2.0"] if "taken" in line}
    assert ranks[8] == [2, 3]
    assert ranks[10] == [1, 2]
    assert ranks[job.steps] == [2, 3]


@pytest.mark.parametrize("step", [3, 4, 6, 7])
def test_workers_that_are_behind_go_on_alone(
    step: int, tmp_path: Path, quick_python: list[str]
) -> None:
    """Also where an epoch ends meanwhile, or others wait for them with an outer step."""
    job = LocalJob(tmp_path, quick_python, lag=["0.2.0", step], joins=10, saves=100)
    assert "worker 0.1.0 exited: SIGKILL" in job.output
    job.require_samples(lost=["0.1.0"])
    job.require_equal()
    job.require_twin()
    taken = {line["taken"]: line["generation"] for line in job.lines["0.2.0"] if "taken" in line}
    assert taken[step + 1] == 0
    assert taken[step + 2] == 1  # alone: the other one has taken it in the generation before
    first = {line["taken"]: line["generation"] for line in job.lines["0.0.0"] if "taken" in line}
    assert first[step + 2] == 0
    # Or a watchdog would take the wrong one for the one that hangs.
    far = {
        (line["taken"], line["generation"]): line["progress"]
        for line in job.lines["0.0.0"]
        if "taken" in line
    }
    again = [line for line in job.lines["0.2.0"] if line.get("generation") == 1]
    both = [line for line in again if (line["taken"], 1) in far]
    assert both
    assert all(line["progress"] == far[line["taken"], 1] for line in both)


@pytest.mark.parametrize("saves", [9, 100])
def test_a_newcomer_joins_at_an_outer_step_that_is_made_again(
    saves: int, tmp_path: Path, quick_python: list[str]
) -> None:
    """Those who were behind leave the generation at the same place as those who were not."""
    told = {"lag": ["0.2.0", 7], "awaits": ["0.2.0", 8], "saves": saves}
    job = LocalJob(tmp_path, quick_python, **told)
    job.require_samples(lost=["0.1.0"])
    job.require_equal()
    job.require_twin()
    assert job.lines["0.1.1"][0]["joins"] == 9


def test_another_is_lost_while_one_is_behind(tmp_path: Path, quick_python: list[str]) -> None:
    """Nobody uses shards of a generation before all have them."""
    told = {"lag": ["0.2.0", 6], "victim": "0.3.0", "dies": ["0.1.0", 1], "saves": 100}
    job = LocalJob(tmp_path, quick_python, ranks=4, joins=9, **told)
    assert job.output.count("exited: SIGKILL") == 2
    taken = {line["taken"] for line in job.lines["0.0.0"] if line.get("generation") == 0}
    behind = {line["taken"]: line["generation"] for line in job.lines["0.2.0"] if "taken" in line}
    assert behind[max(taken)] == 1
    job.require_equal()
    job.require_twin()
    ids = [index for line in job.of("batch") if line["epoch"] == 2 for index in line["ids"]]
    assert len(ids) == len({*ids})


@pytest.mark.parametrize("place", ["source", "healed", "groups"])
def test_one_that_is_lost_while_others_change(
    place: str, tmp_path: Path, quick_python: list[str]
) -> None:
    second = {"source": ["0.1.0", "source", None], "healed": ["0.0.1", "healed", None]}
    faults = [["0.0.0", "forward", 7], second.get(place, ["0.1.0", "groups", 7])]
    job = LocalJob(tmp_path, quick_python, faults=faults, joins=10)
    assert job.output.count("exited: SIGKILL") == 2
    job.require_equal()


def test_compressed_workers_stay_equal_and_the_writer_need_not_be_the_first(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """The one that writes has the number 1 once another has come in the place of the first."""
    job = LocalJob(tmp_path, quick_python, codec="int8", faults=[["0.0.0", "forward", 7]], joins=10)
    job.require_equal()
    newest = max((tmp_path / "ckpt").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    state = torch.load(newest, weights_only=True)["objects"]["updates"]
    assert len(state["workers"]) == 3
    assert state["shared"]["attempted"] == job.steps
