"""Settings of a Trainer, each with a rank that is killed: the end is that of a run without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs import Fault, Job, run_jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # the first test waits for all jobs

FLAGS: dict[str, dict[str, Any]] = {
    "accumulate_grad_batches, limit_train_batches": {
        "accumulate_grad_batches": 2,
        "limit_train_batches": 5,
    },
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2},
    "detect_anomaly, deterministic": {"detect_anomaly": True, "deterministic": True},
    "gradient_clip_val": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3},
    "gradient_clip_algorithm": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "limit_train_batches": {"limit_train_batches": 0.5},
    "limit_val_batches, num_sanity_val_steps": {"limit_val_batches": 1, "num_sanity_val_steps": 2},
    "max_steps": {"max_steps": 11, "max_epochs": -1},
    "min_steps": {"min_steps": 11, "max_epochs": 1},
    "precision": {"precision": "bf16-mixed"},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "val_check_interval": {"val_check_interval": 0.5},
    "val_check_interval across epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None},
}


@pytest.fixture(scope="module")
def ends(
    tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]
) -> dict[str, list[list[Any]]]:
    """Weights, steps and epochs of both ranks by job, without and with a fault."""
    folder, jobs = tmp_path_factory.mktemp("flags"), []
    for number, fit in enumerate(FLAGS.values()):
        for kind, faults in (("quiet", []), ("killed", [Fault("kill", "on_after_backward", 5)])):
            name = f"{kind}-{number}"
            jobs.append(Job(name, str(folder / name), faults=faults, fit=fit))
    results = run_jobs(jobs, folder, python=quick_python)
    assert {result["codes"][-1] for result in results.values()} == {"ok"}
    found: dict[str, list[list[Any]]] = {}
    for number, flag in enumerate(FLAGS):
        assert (folder / f"killed-{number}" / "fired-0-1").exists()
        found[flag] = [end_of(folder / f"{kind}-{number}") for kind in ("quiet", "killed")]
    return found


def end_of(folder: Path) -> list[Any]:
    return [json.loads((folder / f"end-0-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("flag", FLAGS)
def test_a_killed_rank_changes_neither_steps_nor_weights(flag: str, ends: Any) -> None:
    quiet, killed = ends[flag]
    assert killed == quiet
    assert quiet[0]["hash"] == quiet[1]["hash"]
    assert len({each[0][0]["hash"] for each in ends.values()}) >= 7  # flags that train otherwise
