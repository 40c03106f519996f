"""Trainers whose ranks are killed: the others take the step again, and newcomers join them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import wandb_runs
from recovering_loops import EPOCHS, SIZE, train
from test_loop_recovery import (
    ENDS_EARLY,
    OTHER_ENDS,
    STEP,
    TERMINATED,
    Job,
    lost_ranks,
    require_saved_on_sigterm,
)
from tiers import some_exhaustive
from torch.utils.data import DataLoader

import lightning_dist
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from lightning_dist.profiling.run import read_run, run_folder

QUICK = ("0.0.0", "between buckets")

pytestmark = [pytest.mark.timeout(400), pytest.mark.ranks(3)]


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


@pytest.mark.parametrize(("victim", "place"), lost_ranks(QUICK))
def test_a_killed_rank_costs_no_sample_and_changes_no_weight(
    victim: str,
    place: str,
    expected: dict[str, torch.Tensor],
    tmp_path: Path,
    quick_python: list[str],
) -> None:
    """Whoever comes in its place takes part in the last steps."""
    action, ends = OTHER_ENDS.get((victim, place), ("kill", "SIGKILL"))
    job = TrainerJob(tmp_path, quick_python, faults=[[victim, place, STEP, action]], joins=10)
    assert f"worker {victim} exited: {ends}" in job.output
    job.require_exact()
    require_logged(job)
    assert job.weights()["passes"] == job.passes()
    job.require_weights(expected)
    worlds = {line["committed"]: line["world"] for line in job.of("committed")}
    assert worlds[STEP] == worlds[EPOCHS * SIZE // 12] == 3
    new = f"{victim[:-1]}1"
    assert {line["committed"] for line in job.lines[new] if "committed" in line} >= {13, 14, 15}
    assert any(len(names) == 2 for names in job.members().values())


@pytest.mark.slow
def test_the_progress_bar_goes_on_at_the_next_leader(
    tmp_path: Path, quick_python: list[str]
) -> None:
    fault = ["0.0.0", "between buckets", STEP]
    job = TrainerJob(tmp_path, quick_python, faults=[fault], joins=10, bar=True)
    job.require_exact()
    ends = {name: line for name, lines in job.lines.items() for line in lines if "end" in line}
    shown = {name: line["shown"] for name, line in ends.items()}
    assert shown == {"0.0.1": 0, "0.1.0": 5, "0.2.0": 0}


@pytest.mark.slow
@pytest.mark.parametrize("who", TERMINATED)
def test_sigterm_leads_to_a_checkpoint(
    who: str, expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    require_saved_on_sigterm(TrainerJob, who, tmp_path, quick_python, expected)


@pytest.mark.slow
@pytest.mark.parametrize("place", some_exhaustive(["forward", "between buckets"], ["forward"]))
def test_accumulated_and_clipped_gradients(
    place: str, expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """Two micro-batches in a step of three ranks, three in one of two; each reduces its loss."""
    for folder in ("none", "one"):
        (tmp_path / folder).mkdir()
    told = {"accumulate": 2, "clip": 0.1, "syncs": True}
    whole = TrainerJob(tmp_path / "none", quick_python, **told)
    faults = [["0.1.0", place, STEP]]
    job = TrainerJob(tmp_path / "one", quick_python, faults=faults, joins=10, **told)
    job.require_exact()
    require_logged(job)
    job.require_weights(whole.weights())
    assert any(not torch.allclose(weight, expected[n]) for n, weight in whole.weights().items())


@pytest.mark.slow
def test_the_last_micro_batch_of_a_step_that_cannot_be_completed_is_not_computed(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    TrainerJob(tmp_path, quick_python, **ENDS_EARLY).require_ended_early(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    some_exhaustive(
        ["forward", "after the vote", "end of epoch", "validation"], ["forward", "end of epoch"]
    ),
)
def test_a_rank_is_lost_at_the_end_of_an_epoch(
    place: str, expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """Its last step is taken again, or the first one of the next; validations go on."""
    faults = [["0.0.0", place, 4]]
    logs = "wandb" if place == "after the vote" else "csv"
    told = {"faults": faults, "joins": 12, "validates": 2, "logs": logs}
    job = TrainerJob(tmp_path, quick_python, **told)
    job.require_exact()
    require_logged(job)
    job.require_weights(expected)
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


@pytest.mark.slow
def test_a_metric_of_an_epoch_is_computed_without_the_rank_that_is_lost_after_its_last_step(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    faults = [["0.1.0", "end of step", 4]]
    job = TrainerJob(tmp_path, quick_python, faults=faults, joins=12, metric=True)
    job.require_exact()
    require_logged(job)
    job.require_weights(expected)
    assert "exit code 75" not in job.output
    trained = [line["trained"] for line in job.of("logged") if line["epoch"] == 0]
    assert len(trained) == 2
    assert len({*trained}) == 1


@pytest.mark.slow
def test_two_ranks_at_once(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """One is left, and goes on alone until both others have come again."""
    both = [["0.0.0", "between buckets", STEP], ["0.2.0", "after the vote", STEP - 1]]
    job = TrainerJob(tmp_path, quick_python, faults=both, joins=10)
    job.require_exact()
    job.require_weights(expected)


@pytest.mark.slow
def test_a_rank_is_lost_before_the_first_batch_of_a_newcomer(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """Within an epoch, in the checkpoint of the step after which the newcomer has joined."""
    faults = [["0.2.0", "between buckets", 1], ["0.1.0", "saving", 7]]
    job = TrainerJob(tmp_path, quick_python, faults=faults, joins=7)
    job.require_exact()
    require_logged(job)
    job.require_weights(expected)
    assert any(names == {"0.0.0", "0.2.1"} for names in job.members().values())


@pytest.mark.slow
def test_compressed_ranks_stay_equal_and_a_rank_that_misses_the_answer_commits(
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> TrainerJob:
    """All samples are validated after each epoch, on three ranks without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    return TrainerJob(folder, quick_python, validates=1.0, syncs=True)


def require_validated(job: Job, whole: Job, *, ids: bool) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "place", "says"),
    [
        ("0.1.0", "validation", True),
        ("0.0.0", "later in the validation", True),
        ("0.2.0", "after the validation", True),
        ("0.0.0", "end of validation", False),
        ("0.1.0", "end of epoch", False),
    ],
)
def test_a_rank_is_lost_in_a_collective_of_lightning(
    victim: str,
    place: str,
    says: bool,
    expected: dict[str, torch.Tensor],
    whole: TrainerJob,
    tmp_path: Path,
    quick_python: list[str],
) -> None:
    """The others validate all samples again, or go on where all have done so."""
    told = {"faults": [[victim, place, 4]], "joins": 12, "validates": 1.0, "syncs": True}
    job = TrainerJob(tmp_path, quick_python, **told)
    job.require_exact()
    require_logged(job)
    job.require_weights(expected)
    require_validated(job, whole, ids=place != "end of validation")
    assert f"worker {victim} was lost" in job.output
    assert ("the validation is run again" in job.output) == says
    assert "exit code 75" not in job.output


@pytest.mark.slow
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
    told: dict[str, Any],
    step: int,
    expected: dict[str, torch.Tensor],
    tmp_path: Path,
    quick_python: list[str],
) -> None:
    """They are beyond it, between two epochs or in the next step; nobody is lost."""
    job = TrainerJob(tmp_path, quick_python, misses=["0.1.0", step, "0.2.0"], **told)
    job.require_exact()
    require_logged(job)
    job.require_weights(expected)
    assert max(line["generation"] for line in job.of("committed")) >= 1
    for lines in job.lines.values():
        validated = [line["validated"] for line in lines if "validated" in line]
        assert validated == sorted({*validated})
    assert "the validation is run again" not in job.output


@pytest.mark.slow
@pytest.mark.parametrize("place", ["later in the validation", "end of batch"])
def test_a_rank_is_lost_between_two_steps_of_an_epoch(
    place: str, expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """In a validation, or in a callback that comes before the step is settled."""
    for folder in ("none", "one"):
        (tmp_path / folder).mkdir()
    told = {"validates": 1.0, "syncs": True, "interval": 2, "meets": True}
    whole = TrainerJob(tmp_path / "none", quick_python, **told)
    job = TrainerJob(tmp_path / "one", quick_python, faults=[["0.1.0", place, 3]], joins=12, **told)
    job.require_exact()
    require_logged(job)
    job.require_weights(expected)
    require_validated(job, whole, ids=True)
    assert {line["validated"] for line in job.of("validated")} == {2, 4, 7, 9, 12, 14}
    assert "exit code 75" not in job.output


@pytest.mark.slow
def test_an_interval_of_validations_is_counted_across_epochs(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    told = {"faults": [["0.1.0", "forward", 6]], "joins": 12, "validates": 1.0, "interval": 2}
    job = TrainerJob(tmp_path, quick_python, **told, across=True)
    job.require_exact()
    job.require_weights(expected)
    assert {line["validated"] for line in job.of("validated")} == {*range(2, 15, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    some_exhaustive(
        ["later in the validation", "end of validation", "forward"],
        ["later in the validation", "forward"],
    ),
)
def test_checkpoints_of_the_best_and_the_profile_go_on_without_the_rank_that_made_them(
    place: str, whole: TrainerJob, tmp_path: Path, quick_python: list[str]
) -> None:
    """All ranks know the same best, whose files are whole; the profile marks the changes."""
    told = {"faults": [["0.0.0", place, 4]], "joins": 7, "validates": 1.0, "syncs": True}
    job = TrainerJob(tmp_path, quick_python, **told, best=True)
    job.require_exact()
    require_validated(job, whole, ids=place != "end of validation")
    assert "exit code 75" not in job.output
    scores = {line["validated"]: line["means"][0] for line in whole.of("validated")}
    best = sorted(scores, key=scores.__getitem__)[-2:]
    kept = {f"step={step}.ckpt": pytest.approx(scores[step], rel=1e-5) for step in best}
    assert all(line["kept"] == kept for line in job.of("end"))
    assert {path.name for path in (tmp_path / "best").glob("*.ckpt")} == set(kept)
    for step in best:
        loaded = torch.load(tmp_path / "best" / f"step={step}.ckpt", weights_only=False)
        assert loaded["global_step"] == step
    folder = run_folder(tmp_path / "profile")
    run = read_run(folder)
    assert [each.number for each in run.generations] == [1, 2]
    assert "0.0.0 was lost" in run.generations[0].reason
    assert "0.0.1 has joined" in run.generations[1].reason
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] >= 4


@pytest.mark.slow
def test_residuals_of_a_lost_rank_are_taken_over(tmp_path: Path, quick_python: list[str]) -> None:
    fault = ["0.1.0", "between buckets", STEP]
    job = TrainerJob(tmp_path, quick_python, codec="int8", mirror=True, faults=[fault], joins=10)
    job.require_exact()
    (told,) = [line for line in job.output.splitlines() if "worker 0.1.0 was lost" in line]
    assert "residuals of 0.1.0 taken over" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "victims"),
    [("none", ["0.2.0", "0.3.0"]), ("int8", ["0.1.0"])],
    ids=["a host", "a rank"],
)
def test_groups_of_hosts_are_rebuilt(
    codec: str, victims: list[str], tmp_path: Path, quick_python: list[str]
) -> None:
    """All ranks, newcomers too, go on from the mean residual."""
    faults = [[each, "between buckets", STEP] for each in victims]
    told: dict[str, Any] = {"ranks": 4, "per_host": 2, "codec": codec}
    job = TrainerJob(tmp_path, quick_python, faults=faults, joins=10, **told)
    job.require_levels(lost=len(victims))
    if codec == "none":
        (tmp_path / "alone").mkdir()
        job.require_weights(train(tmp_path / "alone", {"accumulate": 4}).state_dict())
        return
    committed = job.of("committed")
    whole = max(line["generation"] for line in committed)
    first = min(line["committed"] for line in committed if line["generation"] == whole)
    there = [line["residual"] for line in committed if line["committed"] == first]
    assert there == [there[0]] * 4
    assert there[0] > 0


class Small(pl.LightningModule):
    """A module with as many parts as a refusal is about."""

    def __init__(self, kind: str = "SGD") -> None:
        super().__init__()
        self.net, self.kind = torch.nn.Linear(2, 1), kind
        self.automatic_optimization = kind != "manual"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        name = "SGD" if self.kind == "manual" else self.kind
        return getattr(torch.optim, name)(self.parameters(), lr=0.1)


@pytest.fixture
def leaves_no_group() -> Iterator[None]:
    """A Trainer that refuses has made the group of its process alone."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def fit(module: pl.LightningModule, *callbacks: pl.Callback, loader: Any = None) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="compressed_ddp_elastic",
        callbacks=list(callbacks),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader or DataLoader(torch.ones(4, 2)))


@pytest.mark.usefixtures("leaves_no_group")
def test_it_needs_elastic_restart() -> None:
    with pytest.raises(ValueError, match=r"needs ElasticRestart\(\.\.\.\) among the callbacks"):
        fit(Small())


@pytest.mark.usefixtures("leaves_no_group")
@pytest.mark.parametrize(
    ("kind", "callbacks", "format", "message"),
    [
        ("manual", [], "single", "automatic_optimization=False"),
        ("LBFGS", [], "single", "LBFGS"),
        ("SGD", ["AsyncCheckpoint"], "single", "a checkpoint with format='sharded'"),
        ("SGD", [], "sharded", "format='single'"),
    ],
)
def test_what_it_cannot_take_again_is_refused(
    kind: str, callbacks: list[str], format: Any, message: str, tmp_path: Path
) -> None:
    """Where no launcher is that replaces ranks too."""
    elastic = lightning_dist.ElasticRestart(tmp_path / "ckpt", format=format)
    others = [getattr(lightning_dist, name)(tmp_path, format="sharded") for name in callbacks]
    with pytest.raises(ValueError, match=message):
        fit(Small(kind), elastic, *others)  # a module in a parameter would keep its groups


def test_delayed_means_are_refused() -> None:
    with pytest.raises(ValueError, match=r"repeats a failed step.*delay=1"):
        lightning_dist.CompressedDDPStrategy(recovery="in_process", delay=1)


@pytest.mark.parametrize(
    "arguments", [{"hierarchical": True}, {"codec": {"intra": "bf16", "inter": "int8"}}]
)
def test_a_hierarchical_exchange_has_no_copies_of_residuals(arguments: dict[str, Any]) -> None:
    given: dict[str, Any] = {"recovery": "in_process", **arguments}
    with pytest.raises(ValueError, match="mirror_residuals copies the residual of each rank"):
        lightning_dist.CompressedDDPStrategy(mirror_residuals=True, **given)
    lightning_dist.CompressedDDPStrategy(**given)


@pytest.mark.parametrize("kind", [FabricStrategy, lightning_dist.LocalUpdateStrategy])
def test_other_strategies_do_not_recover(kind: type) -> None:
    with pytest.raises(ValueError, match=r"ElasticLoop\(recovery='in_process'\)"):
        kind(recovery="in_process")
