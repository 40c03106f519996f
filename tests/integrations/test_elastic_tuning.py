"""Finders, the Tuner and short runs with ElasticRestart: each works, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from elastic_runs import FailAt, Fault, Net, Numbered, hash_of, make_loader
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner

from lightning_dist import ElasticRestart
from lightning_dist.checkpoint.disk.scan import newest_valid


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
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            "callbacks": [restart, *others] if first else [*others, restart],
            **arguments,
        }
    )


class EachEpoch(LearningRateFinder):
    """As Lightning's documentation has one that looks again at some epochs."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.lr_find(trainer, pl_module)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder, EachEpoch])
def test_a_finder_within_a_fit_is_refused(finder: Any, first: bool, tmp_path: Path) -> None:
    """It would run at every restart, and what it restores at its end is not the checkpoint."""
    message = rf"ElasticRestart.*{finder.__name__}.*Tuner\(trainer\)"
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, finder(), first=first).fit(Tuned())
    assert not list(tmp_path.rglob("*.ckpt"))


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


@pytest.mark.parametrize("fast", [True, 3])
def test_a_fast_dev_run_leaves_nothing(fast: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, fast_dev_run=fast)
    trainer.fit(Tuned())
    assert trainer.global_step == int(fast)
    assert not list(tmp_path.rglob("*.ckpt"))
    assert not (tmp_path / "ckpt" / "elastic").exists()


def test_no_train_batches(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, limit_train_batches=0)
    trainer.fit(Tuned())
    assert trainer.global_step == 0
    assert trainer.limit_train_batches == 0


def test_a_fast_dev_run_of_a_run_that_has_begun(tmp_path: Path) -> None:
    """It neither goes on from its checkpoints nor touches them."""
    trainer_of(tmp_path).fit(Tuned())
    before = sorted(path.name for path in (tmp_path / "ckpt").glob("*.ckpt"))
    trainer = trainer_of(tmp_path, fast_dev_run=2)
    trainer.fit(Tuned())
    assert trainer.global_step == 2
    assert sorted(path.name for path in (tmp_path / "ckpt").glob("*.ckpt")) == before
