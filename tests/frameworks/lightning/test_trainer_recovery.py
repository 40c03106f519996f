"""Trainers whose ranks are killed at ends of epochs, in validations and in callbacks."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb_runs
from needs import needs
from recovering_jobs import STEP, TrainerJob, weights_alone
from recovering_loops import SIZE
from tiers import some_exhaustive

from lightning_dist.base.features import RECOVERY

pytestmark = [
    needs(RECOVERY),
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.ranks(3),
]


def test_the_progress_bar_goes_on_at_the_next_leader(
    tmp_path: Path, quick_python: list[str]
) -> None:
    fault = ["0.0.0", "between buckets", STEP]
    job = TrainerJob(tmp_path, quick_python, faults=[fault], joins=10, bar=True)
    job.require_exact()
    ends = {name: line for name, lines in job.lines.items() for line in lines if "end" in line}
    shown = {name: line["shown"] for name, line in ends.items()}
    assert shown == {"0.0.1": 0, "0.1.0": 5, "0.2.0": 0}


@pytest.mark.parametrize("place", some_exhaustive(["forward", "between buckets"], ["forward"]))
def test_accumulated_and_clipped_gradients(
    place: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """Two micro-batches in a step of three ranks, three in one of two."""
    told = {"accumulate": 2, "clip": 0.1}
    whole = TrainerJob(tmp_path / "none", quick_python, **told)
    faults = [["0.1.0", place, STEP]]
    job = TrainerJob(tmp_path / "one", quick_python, faults=faults, joins=10, **told)
    job.require_exact()
    job.require_weights(whole.weights())
    alone = weights_alone(3)
    assert any(not torch.allclose(weight, alone[n]) for n, weight in whole.weights().items())


def test_a_step_whose_loss_is_reduced_is_taken_again(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """By ``self.log(sync_dist=True)``: ranks wait for each other before the exchange, too."""
    fault = ["0.1.0", "forward", STEP]
    job = TrainerJob(tmp_path, quick_python, faults=[fault], joins=10, syncs=True)
    job.require_exact()
    assert f"step {STEP + 1} is repeated" in job.output


@pytest.mark.parametrize("place", some_exhaustive(["forward", "end of epoch"], ["end of epoch"]))
def test_a_rank_is_lost_at_the_end_of_an_epoch(
    place: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """Its last step is taken again, or the first one of the next."""
    logs, validates = ("wandb", 2) if place == "forward" else ("csv", 0)
    told = {"faults": [["0.0.0", place, 4]], "joins": 12, "validates": validates, "logs": logs}
    job = TrainerJob(tmp_path, quick_python, **told)
    job.require_exact()
    assert "exit code 75" not in job.output
    written = (tmp_path / "lightning_logs" / "version_0-0.1.0" / "metrics.csv").read_text()
    rows = list(csv.DictReader(written.splitlines()))
    assert {int(row["step"]) for row in rows if row["loss_step"]} >= set(range(5, 15))
    assert "2.0" in {row["elastic/world_size"] for row in rows}
    if logs == "wandb":
        require_one_wandb_run(tmp_path)


def require_one_wandb_run(folder: Path) -> None:
    """Two leaders have logged, one after the other, each step at most once.

    What wandb's process had not written yet is lost with the first one.
    """
    first, second = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.parent.name)
    assert first.name == second.name
    steps = [
        [
            int(item.value_json)
            for record in wandb_runs.written(path)
            for item in record.history.item
            if (item.key or item.nested_key[0]) == "trainer/global_step"
        ]
        for path in (first, second)
    ]
    assert [*steps[0], *steps[1]] == sorted([*steps[0], *steps[1]])
    assert not set(steps[0]) & set(steps[1])
    assert {*steps[1]} >= set(range(5, 15))


def test_a_rank_is_lost_before_the_first_batch_of_a_newcomer(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """Within an epoch, in the checkpoint of the step after which the newcomer has joined."""
    faults = [["0.2.0", "between buckets", 1], ["0.1.0", "saving", 7]]
    job = TrainerJob(tmp_path, quick_python, faults=faults, joins=7)
    job.require_exact()
    assert any(names == {"0.0.0", "0.2.1"} for names in job.members().values())


ALL: dict[str, Any] = {"validates": 1.0, "syncs": True, "interval": 2, "meets": True}
"""All samples are validated after each second batch of an epoch, and ranks wait for each other."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> TrainerJob:
    """Without a fault."""
    return TrainerJob(tmp_path_factory.mktemp("whole"), quick_python, **ALL)


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("validation", 6),
        ("later in the validation", 6),
        ("end of batch", 6),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                ("validation", 3),
                ("after the validation", 6),
                ("end of validation", 6),
                ("end of epoch", 9),
                ("after the step", 14),
            )
        ),
    ],
)
def test_all_restart_if_a_rank_is_lost_where_others_wait_for_it_outside_of_a_step(
    place: str, step: int, whole: TrainerJob, tmp_path: Path, quick_python: list[str]
) -> None:
    """From the last checkpoint: validations, and the best of them, are those without a fault."""
    job = TrainerJob(tmp_path, quick_python, faults=[["0.1.0", place, step]], **ALL, best=True)
    assert "a rank was lost outside of training steps" in job.output
    assert "exited: exit code 75" in job.output
    job.require_exact(again=True)
    job.require_weights(whole.weights())
    means = {line["validated"]: line["means"] for line in whole.of("validated")}
    assert {*means} == {2, 4, 7, 9, 12, 14}
    for at, expected in means.items():
        told = [line for line in job.last("validated") if line["validated"] == at]
        assert len(told) == 3
        assert all(line["means"] == pytest.approx(expected, rel=1e-5) for line in told)
        assert sorted(n for line in told for n in line["ids"]) == list(range(SIZE))
    best = sorted(found[0] for found in means.values())[-2:]
    for line in job.of("end"):
        assert sorted(line["kept"].values()) == pytest.approx(best, rel=1e-5)
        assert all((tmp_path / "best" / name).is_file() for name in line["kept"])


FLAGS: list[dict[str, Any]] = [
    {"accumulate_grad_batches": 2, "limit_train_batches": 4, "max_epochs": 6},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"max_steps": 11, "max_epochs": -1},
    {"reload_dataloaders_every_n_epochs": 1},
    {"limit_train_batches": 0.6, "max_epochs": 5},
    {"check_val_every_n_epoch": 2, "limit_val_batches": 1.0},
    {"val_check_interval": 0.5, "limit_val_batches": 2},
    {"num_sanity_val_steps": 2, "limit_val_batches": 1.0},
]


@pytest.mark.parametrize(
    "flags",
    [FLAGS[0], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in FLAGS[1:])],
    ids=lambda flags: ", ".join(flags),
)
def test_a_lost_rank_changes_neither_steps_nor_weights(
    flags: dict[str, Any], tmp_path: Path, quick_python: list[str]
) -> None:
    """With each setting of a Trainer, as without a fault."""
    quiet = TrainerJob(tmp_path / "none", quick_python, flags=flags)
    fault = ["0.1.0", "between buckets", STEP]
    job = TrainerJob(tmp_path / "one", quick_python, flags=flags, faults=[fault], joins=8)
    assert f"step {STEP + 1} is repeated" in job.output
    assert "exit code 75" not in job.output
    (steps,) = {line["end"] for line in quiet.of("end")}
    assert {line["end"] for line in job.of("end")} == {steps}
    assert len(job.of("end")) == 3
    job.require_weights(quiet.weights())


def test_an_interval_of_validations_is_counted_across_epochs(
    tmp_path: Path, quick_python: list[str]
) -> None:
    told = {"faults": [["0.1.0", "forward", 6]], "joins": 12, "validates": 1.0, "interval": 2}
    job = TrainerJob(tmp_path, quick_python, **told, across=True)
    job.require_exact()
    assert {line["validated"] for line in job.of("validated")} == {*range(2, 15, 2)}
