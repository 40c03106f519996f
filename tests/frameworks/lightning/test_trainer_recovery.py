"""Trainers whose ranks are killed in validations, callbacks and at ends of epochs."""

import csv
import json
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
from lightning_dist.profiling.run import read_run, run_folder

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
    """Two micro-batches in a step of three ranks, three in one of two; each reduces its loss."""
    told = {"accumulate": 2, "clip": 0.1, "syncs": True}
    whole = TrainerJob(tmp_path / "none", quick_python, **told)
    faults = [["0.1.0", place, STEP]]
    job = TrainerJob(tmp_path / "one", quick_python, faults=faults, joins=10, **told)
    job.require_exact()
    job.require_weights(whole.weights())
    alone = weights_alone(3)
    assert any(not torch.allclose(weight, alone[n]) for n, weight in whole.weights().items())


@pytest.mark.parametrize(
    "place",
    some_exhaustive(
        ["forward", "after the vote", "end of epoch", "validation"], ["forward", "end of epoch"]
    ),
)
def test_a_rank_is_lost_at_the_end_of_an_epoch(
    place: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """Its last step is taken again, or the first one of the next; validations go on."""
    faults = [["0.0.0", place, 4]]
    logs = "wandb" if place == "after the vote" else "csv"
    told = {"faults": faults, "joins": 12, "validates": 2, "logs": logs}
    job = TrainerJob(tmp_path, quick_python, **told)
    job.require_exact()
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


def test_a_metric_of_an_epoch_is_computed_without_the_rank_that_is_lost_after_its_last_step(
    tmp_path: Path, quick_python: list[str]
) -> None:
    faults = [["0.1.0", "end of step", 4]]
    job = TrainerJob(tmp_path, quick_python, faults=faults, joins=12, metric=True)
    job.require_exact()
    assert "exit code 75" not in job.output
    trained = [line["trained"] for line in job.of("logged") if line["epoch"] == 0]
    assert len(trained) == 2
    assert len({*trained}) == 1


def test_a_rank_is_lost_before_the_first_batch_of_a_newcomer(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """Within an epoch, in the checkpoint of the step after which the newcomer has joined."""
    faults = [["0.2.0", "between buckets", 1], ["0.1.0", "saving", 7]]
    job = TrainerJob(tmp_path, quick_python, faults=faults, joins=7)
    job.require_exact()
    assert any(names == {"0.0.0", "0.2.1"} for names in job.members().values())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> TrainerJob:
    """All samples are validated after each epoch, on three ranks without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    return TrainerJob(folder, quick_python, validates=1.0, syncs=True)


def require_validated(job: TrainerJob, whole: TrainerJob, *, ids: bool) -> None:
    """Metrics are those without a fault on all ranks, and of each sample once."""
    means = {line["validated"]: line["means"] for line in whole.of("validated")}
    for step, expected in means.items():
        told = [line for line in job.of("validated") if line["validated"] == step]
        assert len(told) >= 2
        for line in told:
            assert line["means"] == pytest.approx(expected, rel=1e-5)
        if ids:
            assert sorted(n for line in told for n in line["ids"]) == list(range(SIZE))
            assert {line["ranks"] for line in told} == {len(told)}


@pytest.mark.parametrize(
    ("victim", "place", "says"),
    [
        ("0.0.0", "forward", False),
        ("0.1.0", "validation", True),
        ("0.0.0", "later in the validation", True),
        ("0.2.0", "after the validation", True),
        ("0.0.0", "end of validation", False),
        ("0.1.0", "end of epoch", False),
    ],
)
def test_a_rank_is_lost_around_a_validation(
    victim: str, place: str, says: bool, whole: TrainerJob, tmp_path: Path, quick_python: list[str]
) -> None:
    """The others validate all samples again, or go on where all have done so.

    All ranks know the same best, whose files are whole; the profile marks the changes.
    """
    told = {"faults": [[victim, place, 4]], "joins": 7, "validates": 1.0, "syncs": True}
    job = TrainerJob(tmp_path, quick_python, **told, best=True)
    job.require_exact()
    require_validated(job, whole, ids=place != "end of validation")
    assert ("the validation is run again" in job.output) == says
    assert "exit code 75" not in job.output
    scores = {line["validated"]: line["means"][0] for line in whole.of("validated")}
    best = sorted(scores, key=scores.__getitem__)[-2:]
    kept = {f"step={step}.ckpt": pytest.approx(scores[step], rel=1e-5) for step in best}
    assert all(line["kept"] == kept for line in job.of("end"))
    assert {path.name for path in (tmp_path / "best").glob("*.ckpt")} == set(kept)
    for step in best:
        loaded = torch.load(tmp_path / "best" / f"step={step}.ckpt", weights_only=False)
        assert loaded["global_step"] == step
    folder, _ = run_folder(tmp_path / "profile")
    run = read_run(folder)
    assert [each.number for each in run.generations] == [1, 2]
    assert f"{victim} was lost" in run.generations[0].reason
    assert f"{victim[:-1]}1 has joined" in run.generations[1].reason
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] >= 4


@pytest.mark.parametrize(
    ("told", "step"),
    [
        pytest.param({"validates": 1.0, "syncs": True}, 4, marks=pytest.mark.exhaustive),
        ({"validates": 1.0, "syncs": True, "interval": 2}, 3),
        ({"meets": True}, 3),
    ],
    ids=["end of epoch", "validation in an epoch", "callback"],
)
def test_a_rank_that_misses_the_end_of_a_section_takes_it_from_the_others(
    told: dict[str, Any], step: int, tmp_path: Path, quick_python: list[str]
) -> None:
    """They are beyond it, between two epochs or in the next step; nobody is lost."""
    job = TrainerJob(tmp_path, quick_python, misses=["0.1.0", step, "0.2.0"], **told)
    job.require_exact()
    assert max(line["generation"] for line in job.of("committed")) >= 1
    for lines in job.lines.values():
        validated = [line["validated"] for line in lines if "validated" in line]
        assert validated == sorted({*validated})
    assert "the validation is run again" not in job.output


@pytest.mark.parametrize("place", ["later in the validation", "end of batch"])
def test_a_rank_is_lost_between_two_steps_of_an_epoch(
    place: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """In a validation, or in a callback that comes before the step is settled."""
    told = {"validates": 1.0, "syncs": True, "interval": 2, "meets": True}
    whole = TrainerJob(tmp_path / "none", quick_python, **told)
    job = TrainerJob(tmp_path / "one", quick_python, faults=[["0.1.0", place, 3]], joins=12, **told)
    job.require_exact()
    require_validated(job, whole, ids=True)
    assert {line["validated"] for line in job.of("validated")} == {2, 4, 7, 9, 12, 14}
    assert "exit code 75" not in job.output


def test_an_interval_of_validations_is_counted_across_epochs(
    tmp_path: Path, quick_python: list[str]
) -> None:
    told = {"faults": [["0.1.0", "forward", 6]], "joins": 12, "validates": 1.0, "interval": 2}
    job = TrainerJob(tmp_path, quick_python, **told, across=True)
    job.require_exact()
    assert {line["validated"] for line in job.of("validated")} == {*range(2, 15, 2)}
