"""Several models and optimizers in one `ElasticLoop`, on two ranks and then on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from elastic_runs import SIZE, committed
from loop_pair import RATES, train
from processes import torchrun

SCRIPT = Path(__file__).with_name("loop_pair.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    torchrun(SCRIPT, folder, ranks=2, limit=90, python=quick_python).require_success()
    return folder


def test_a_second_start_goes_on_to_the_same_end(folder: Path) -> None:
    """To the bit: both models, both optimizers, the residuals of both, two passes for a step."""
    first, other = (json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1))
    assert first == other
    assert first["run"]["hash"] == first["quiet"]["hash"]
    assert first["run"]["steps"] == first["quiet"]["steps"] == 6
    assert first["run"]["rates"] == first["quiet"]["rates"][4:]


@pytest.mark.parametrize(
    ("policy", "factor", "batch"),
    [("scale_lr", 0.5, 8), ("scale_lr:sqrt", 0.5**0.5, 8), ("fixed_global_batch", 1.0, 16)],
)
def test_one_rank_goes_on_with_other_learning_rates(
    policy: Any, factor: float, batch: int, folder: Path
) -> None:
    """Of both optimizers, and of the scheduler of one of them."""
    found = train(folder / policy, batch_policy=policy)
    before, after = RATES, RATES["judge"] * 0.5  # from step 6 on, by the scheduler
    rates = found["rates"]
    assert rates[0] == pytest.approx([rate * factor for rate in before.values()])
    assert rates[-1] == pytest.approx([before["maker"] * factor, after * factor])
    steps = committed(folder / policy / "account")
    resumed = [step for step in steps.values() if step.world == 1]
    assert len(resumed[0].ids) == batch
    for epoch in range(2):
        ids = [each for step in steps.values() if step.epoch == epoch for each in step.ids]
        assert sorted(ids) == list(range(SIZE))
