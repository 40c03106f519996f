"""What ElasticRestart refuses, by name and with a remedy; finders, the Tuner and short runs."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from elastic_runs import (
    FailAt,
    Fault,
    Net,
    Numbered,
    committed,
    fit,
    fit_with_faults,
    hash_of,
    journal,
    make_loader,
    quiet_trainer,
)
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    OnExceptionCheckpoint,
)
from lightning.pytorch.tuner import Tuner
from loop_runs import net

from lightning_dist import AsyncCheckpoint, ElasticLoop, ElasticRestart
from lightning_dist.checkpoint.disk.scan import newest_valid


def restart(folder: Path, **settings: Any) -> Any:
    return ElasticRestart(folder, **settings)


def loop(folder: Path, **settings: Any) -> Any:
    return ElasticLoop(folder, loader=make_loader(), state={"model": net()}, **settings)


@pytest.mark.parametrize("make", [restart, loop])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"batch_policy": "constant"},
            "batch_policy must be 'fixed_global_batch'.* got 'constant'",
        ),
        ({"max_to_keep": 0}, "max_to_keep must be 1 or more checkpoints, got 0"),
        ({"every_n_train_steps": 0}, "every_n_train_steps must be 1 or more steps"),
        ({"every_n_epochs": -1}, "every_n_epochs must be 0 or more epochs"),
        ({"every_n_epochs": 0}, "after steps, after epochs or both.* and every_n_epochs=0"),
        ({"grace_period": -1.0}, "grace_period must be seconds above 0"),
        ({"hang_timeout": 0}, "hang_timeout must be seconds above 0, or None"),
        ({"format": "both"}, "format must be 'single' or 'sharded', got 'both'"),
    ],
)
def test_settings_that_mean_nothing(
    settings: dict[str, Any], message: str, make: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"monitor": "score"}, "monitor cannot take effect; add an AsyncCheckpoint with a folder"),
        ({"save_top_k": 3, "mode": "max"}, "mode, save_top_k cannot take effect"),
        ({"filename": "{step}"}, "filename cannot take effect"),
        ({"dirpath": ""}, "dirpath must be the folder of the checkpoints"),
    ],
)
def test_settings_of_a_model_checkpoint(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticRestart(**{"dirpath": "here", **settings})


class EachEpoch(LearningRateFinder):
    """As Lightning's documentation has one that looks again at some epochs."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.lr_find(trainer, pl_module)


def of_finder(finder: type[L.Callback]) -> tuple[Any, str]:
    """It would run at every restart, and what it restores at its end is not the checkpoint."""
    return lambda folder: finder(), rf"ElasticRestart.*{finder.__name__}.*Tuner\(trainer\)"


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: GradientAccumulationScheduler({0: 2}),
            "GradientAccumulationScheduler cannot take effect",
        ),
        (
            lambda folder: AsyncCheckpoint(folder / "ckpt", save_last=True),
            r"AsyncCheckpoint saves into .*ckpt too.*dirpath=",
        ),
        *map(of_finder, (LearningRateFinder, BatchSizeFinder, EachEpoch)),
    ],
)
def test_callbacks_beside_it(make: Any, message: str, first: bool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, make(tmp_path), first=first).fit(Tuned())
    assert not list(tmp_path.rglob("*.ckpt"))


def test_settings_of_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="overfit_batches cannot take effect"):
        fit(tmp_path, overfit_batches=2)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_validation_may_come_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    """Its checkpoints are of whole steps all the same, and a restart goes on from one."""
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_epochs": 1}
    trainer, module = fit(tmp_path / "whole", **settings)
    assert trainer.global_step == 6
    faults = [("on_validation_end", 1), ("on_validation_end", 4)]
    _, resumed = fit_with_faults(tmp_path / "parts", faults, **settings)
    assert committed(tmp_path / "parts" / "account") == committed(tmp_path / "whole" / "account")
    assert hash_of(resumed) == hash_of(module)


def broken_off(folder: Path, **settings: Any) -> None:
    with pytest.raises(Fault):
        fit(folder, FailAt("on_after_backward", 7), **settings)


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    broken_off(tmp_path)
    other = Net()
    other.extra = other.net[0]
    with pytest.raises(ValueError, match=r"is a checkpoint of another model.*Give another folder"):
        fit(tmp_path, module=other)


def test_a_folder_of_another_callback(tmp_path: Path) -> None:
    other = AsyncCheckpoint(tmp_path / "ckpt", every_n_train_steps=2)
    trainer_of(tmp_path, callbacks=[other], max_epochs=1).fit(Tuned())
    with pytest.raises(ValueError, match=r"was not saved under ElasticRestart.*use another folder"):
        fit(tmp_path)


def test_a_checkpoint_at_an_exception_may_be_beside(tmp_path: Path) -> None:
    beside = OnExceptionCheckpoint(tmp_path / "failed")
    with pytest.raises(Fault):
        fit(tmp_path, beside, FailAt("on_after_backward", 3))
    assert (tmp_path / "failed" / "on_exception.ckpt").exists()
    trainer, _ = fit(tmp_path, beside)
    assert trainer.global_step == 36


def test_the_newest_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken_off(tmp_path)
    newest = max((tmp_path / "ckpt").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-100])
    trainer, _ = fit(tmp_path)
    assert f"Skipping a checkpoint: {newest}" in caplog.text
    assert trainer.global_step == 36


def test_an_explicit_checkpoint_begins_a_run_and_does_not_take_it_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken_off(tmp_path / "first")
    begin = str(next((tmp_path / "first" / "ckpt").glob("*step=4.ckpt")))
    caplog.clear()
    logs = caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero")
    with logs, pytest.raises(Fault):
        fit(tmp_path / "second", FailAt("on_after_backward", 11), ckpt_path=begin)
    (start,) = [each for each in caplog.messages if "elastic: world" in each]
    assert "resumed at sample 16 (epoch 0, step 4)" in start
    trainer, _ = fit(tmp_path / "second", ckpt_path=begin)
    assert trainer.global_step == 36
    steps = (tmp_path / "second" / "account" / "rank-0.jsonl").read_text().splitlines()
    assert len(steps) == (11 - 4) + (36 - 10), "the second start went on at step 10, not 4"
    runs = {journal(tmp_path / name)[0]["run_id"] for name in ("first", "second")}
    assert len(runs) == 2, "a branch is a run of its own"


class Tuned(Net):
    """Has what finders set, and its loaders."""

    def __init__(self) -> None:
        super().__init__(noisy=False)
        self.batch_size = 4

    def train_dataloader(self) -> Any:
        return make_loader(Numbered(noisy=False), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return make_loader(Numbered(noisy=False), batch_size=self.batch_size, shuffle=False)


def trainer_of(folder: Path, *others: L.Callback, first: bool = False, **arguments: Any) -> Any:
    restart = ElasticRestart(folder / "ckpt", every_n_train_steps=2, seed=5, writer="thread")
    callbacks = [restart, *others] if first else [*others, restart]
    given = {"callbacks": callbacks, "max_epochs": 2, "num_sanity_val_steps": 2, **arguments}
    return quiet_trainer(default_root_dir=folder, **given)


@pytest.mark.slow
@pytest.mark.parametrize("find", ["lr", "batch size"])
def test_a_tuner_before_the_fit(find: str, tmp_path: Path) -> None:
    """At every start of the script, as it is written; the run is that of a script without it."""

    def start(folder: Path, *others: L.Callback, tunes: bool) -> Tuned:
        torch.manual_seed(1)
        module, trainer = Tuned(), trainer_of(folder, *others)
        if tunes and find == "lr":
            found = Tuner(trainer).lr_find(module, num_training=5, update_attr=False)
            assert len(found.results["lr"]) == 5
        elif tunes:
            size = Tuner(trainer).scale_batch_size(module, max_trials=3, steps_per_trial=1)
            assert size == module.batch_size != 4
            module.batch_size = 4
        assert newest_valid(str(folder / "ckpt")) is None or trainer.global_step == 0
        trainer.fit(module)
        assert trainer.global_step == 24
        return module

    reference = start(tmp_path / "reference", tunes=False)
    with pytest.raises(Fault):
        start(tmp_path / "run", FailAt("on_train_batch_start", 7), tunes=True)
    newest = newest_valid(str(tmp_path / "run" / "ckpt"))
    assert newest is not None
    assert "step=6" in newest.path
    assert hash_of(start(tmp_path / "run", tunes=True)) == hash_of(reference)


class SavesEarly(L.Callback):
    """Saves before the loaders are made, as finders do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_from_before_the_loaders_are_made(tmp_path: Path) -> None:
    """It says nothing of batches that nobody knows yet."""
    early, reference, module = tmp_path / "early.ckpt", Tuned(), Tuned()
    trainer_of(tmp_path / "run", SavesEarly(early)).fit(reference)
    trainer = trainer_of(tmp_path / "from it")
    trainer.fit(module, ckpt_path=early)
    assert trainer.global_step == 24, "12 batches of 4 in each of 2 epochs"
    assert hash_of(module) == hash_of(reference)


@pytest.mark.parametrize(("fast", "has_begun"), [(True, False), (3, False), (2, True)])
def test_a_fast_dev_run_leaves_all_as_it_was(fast: Any, has_begun: bool, tmp_path: Path) -> None:
    """It neither goes on from the checkpoints of a run nor touches them."""
    if has_begun:
        trainer_of(tmp_path).fit(Tuned())
    before = sorted(tmp_path.rglob("*.ckpt"))
    trainer = trainer_of(tmp_path, fast_dev_run=fast)
    trainer.fit(Tuned())
    assert trainer.global_step == int(fast)
    assert sorted(tmp_path.rglob("*.ckpt")) == before
    assert (tmp_path / "ckpt" / "elastic").exists() == has_begun == bool(before)


def test_no_train_batches(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, limit_train_batches=0)
    trainer.fit(Tuned())
    assert trainer.global_step == 0
    assert trainer.limit_train_batches == 0


class Adamic(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_the_state_of_another_optimizer(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    with pytest.raises(ValueError, match=r"another optimizer than Adam: .* no betas, eps;"):
        fit(tmp_path, module=Adamic(), max_epochs=2)
