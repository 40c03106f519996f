"""What `ckpt_path=` means beside ElasticRestart, and what a start says of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from elastic_runs import FailAt, Fault, Net, fit, make_loader
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist import AsyncCheckpoint, ElasticRestart

LOGGER = "lightning.pytorch.utilities.rank_zero"


class WorseEachEpoch(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", float(self.current_epoch))


def trainer_with(callbacks: list[L.Callback], **arguments: Any) -> L.Trainer:
    settings = {"accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": 2}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(callbacks=callbacks, num_sanity_val_steps=0, **settings, **quiet, **arguments)


def validation() -> Any:
    return make_loader(shuffle=False)


@pytest.mark.parametrize("kind", [ModelCheckpoint, AsyncCheckpoint])
@pytest.mark.parametrize("order", [1, -1])
def test_best_is_of_the_callback_that_monitors(tmp_path: Path, kind: Any, order: int) -> None:
    monitors = kind(tmp_path / "best", monitor="loss", save_top_k=2)
    restart = ElasticRestart(tmp_path / "newest", every_n_train_steps=5, writer="thread")
    trainer, module = trainer_with([restart, monitors][::order]), WorseEachEpoch()
    trainer.fit(module, make_loader(), validation())
    assert torch.load(monitors.best_model_path)["epoch"] == 0
    trainer.validate(module, validation(), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == monitors.best_model_path
    assert trainer.checkpoint_callback is monitors


def test_best_is_the_newest_where_nobody_monitors(tmp_path: Path) -> None:
    trainer, module = fit(tmp_path, max_epochs=2)
    trainer.validate(module, validation(), ckpt_path="best", verbose=False)
    assert str(trainer.ckpt_path).endswith("step=24.ckpt")


def start_of(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [each for each in caplog.messages if "elastic: world" in each]
    return line


def test_a_checkpoint_that_was_not_saved_under_elastic_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock = ModelCheckpoint(tmp_path / "stock", every_n_train_steps=5, save_top_k=-1)
    trainer_with([stock]).fit(Net(), make_loader())
    given = str(tmp_path / "stock" / "epoch=1-step=15.ckpt")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=LOGGER), pytest.raises(Fault):
        fit(tmp_path, FailAt("on_after_backward", 19), validate=False, ckpt_path=given)
    line = start_of(caplog)
    assert "fresh start" not in line
    assert f"world 1, resumed from {given} (epoch 1, step 15)" in line
    assert "its samples of epoch 1 are not known" in line
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=LOGGER):
        fit(tmp_path, validate=False, ckpt_path=given)
    assert "(epoch 1, step 18)" in start_of(caplog), "its own checkpoint comes first"
    assert f"ckpt_path={given!r} is not loaded" in caplog.text


def test_a_checkpoint_of_another_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path / "one", validate=False, max_epochs=1)
    given = str(tmp_path / "one" / "ckpt" / "epoch=0-step=10.ckpt")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=LOGGER):
        fit(tmp_path / "two", validate=False, max_epochs=1, ckpt_path=given)
    assert "resumed at sample 40 (epoch 0, step 10)" in start_of(caplog)
