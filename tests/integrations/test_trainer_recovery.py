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
    assert job.weights()["passes"] == job.passes()
    require_weights(job, expected)
    worlds = {line["committed"]: line["world"] for line in job.of("committed")}
    assert worlds[STEP] == worlds[EPOCHS * SIZE // 12] == 3
    new = f"{victim[:-1]}1"
    assert {line["committed"] for line in job.lines[new] if "committed" in line} >= {13, 14, 15}
    assert any(len(names) == 2 for names in job.members().values())
