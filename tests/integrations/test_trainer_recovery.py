"""Trainers whose ranks are killed: the others take the step again, and newcomers join them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recovering_loops import EPOCHS, SIZE, train
from test_loop_recovery import PLACES, STEP, Job

QUICK = ("0.0.0", "between buckets")

pytestmark = pytest.mark.timeout(400)


class TrainerJob(Job):
    """Three ranks of a Trainer."""

    script = Path(__file__).parent / "recovering_trainers.py"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a loop of one process without a fault."""
    return dict(train(tmp_path_factory.mktemp("reference"), {}).state_dict())


def require_logged(job: Job) -> None:
    """What a rank has logged in an epoch is what it has computed for weights."""
    for lines in job.lines.values():
        taken = {(line["committed"], line["generation"]) for line in lines if "committed" in line}
        computed = [line for line in lines if "computed" in line]
        for told in (line for line in lines if "logged" in line):
            of_epoch = [line for line in computed if line["epoch"] == told["epoch"]]
            done = [each for each in of_epoch if (each["computed"], each["generation"]) in taken]
            assert told["logged"] == sum(len(each["ids"]) for each in done), told


def require_weights(job: Job, expected: dict[str, torch.Tensor]) -> None:
    for name, weight in job.weights().items():
        if name != "passes":
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        pytest.param(each, place, marks=() if (each, place) == QUICK else pytest.mark.slow)
        for each in ("0.0.0", "0.1.0", "0.2.0")
        for place in PLACES
    ],
)
def test_a_killed_rank_costs_no_sample_and_changes_no_weight(
    victim: str,
    place: str,
    expected: dict[str, torch.Tensor],
    tmp_path: Path,
    quick_python: list[str],
) -> None:
    """Whoever comes in its place takes part in the last steps."""
    job = TrainerJob(tmp_path, quick_python, faults=[[victim, place, STEP]], joins=10)
    job.require_exact()
    require_logged(job)
    assert job.weights()["passes"] == job.passes()
    require_weights(job, expected)
    worlds = {line["committed"]: line["world"] for line in job.of("committed")}
    assert worlds[STEP] == worlds[EPOCHS * SIZE // 12] == 3
    new = f"{victim[:-1]}1"
    assert {line["committed"] for line in job.lines[new] if "committed" in line} >= {13, 14, 15}
    assert any(len(names) == 2 for names in job.members().values())


@pytest.mark.slow
def test_accumulated_and_clipped_gradients(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """Two micro-batches in a step of three ranks, three in one of two; clipped above all norms."""
    faults = [["0.1.0", "between buckets", STEP]]
    job = TrainerJob(tmp_path, quick_python, faults=faults, joins=10, accumulate=2, clip=1e9)
    job.require_exact()
    require_logged(job)
    require_weights(job, expected)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "after the vote", "end of epoch", "validation"])
def test_a_rank_is_lost_at_the_end_of_an_epoch(
    place: str, expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """Its last step is taken again, or the first one of the next; validations go on."""
    faults = [["0.0.0", place, 4]]
    job = TrainerJob(tmp_path, quick_python, faults=faults, joins=12, validates=True)
    job.require_exact()
    require_logged(job)
    require_weights(job, expected)


@pytest.mark.slow
def test_two_ranks_at_once(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """One is left, and goes on alone until both others have come again."""
    both = [["0.0.0", "between buckets", STEP], ["0.2.0", "after the vote", STEP - 1]]
    job = TrainerJob(tmp_path, quick_python, faults=both, joins=10)
    job.require_exact()
    require_weights(job, expected)


@pytest.mark.slow
def test_compressed_ranks_stay_equal_and_whoever_misses_the_answer_commits(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """Rank 0 dies after a vote whose answer rank 1 has not heard, and rank 2 has."""
    job = TrainerJob(
        tmp_path,
        quick_python,
        codec="int8",
        faults=[["0.0.0", "after the vote", STEP]],
        lost=[["0.1.0", STEP, "0.2.0"]],
        joins=10,
    )
    job.require_exact()
    taken = [line for line in job.of("committed") if line["committed"] == STEP + 1]
    assert {line["generation"] for line in taken} == {0}


@pytest.mark.slow
def test_a_rank_that_is_lost_in_a_collective_of_lightning_restarts_all(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """From the last checkpoint, and the reason is said."""
    faults = [["0.1.0", "validation", 4]]
    job = TrainerJob(tmp_path, quick_python, faults=faults, validates=True, syncs=True)
    assert "lost outside of a training step" in job.output
    assert "exit code 75" in job.output
    require_weights(job, expected)
    assert len(job.of("end")) == 3
