"""What ElasticRestart cannot keep over a restart it refuses, by name and with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from elastic_runs import (
    FailAt,
    Fault,
    Net,
    committed,
    fit,
    fit_with_faults,
    hash_of,
    make_loader,
)
from lightning.pytorch.callbacks import GradientAccumulationScheduler, OnExceptionCheckpoint
from loop_runs import net

from lightning_dist import AsyncCheckpoint, ElasticLoop, ElasticRestart


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
            "batch_policy must be one of 'fixed_global_batch'.* got 'constant'",
        ),
        ({"max_to_keep": 0}, "max_to_keep must be positive; got 0"),
        ({"every_n_train_steps": 0}, "every_n_train_steps must be positive; got 0"),
        ({"every_n_epochs": -1}, "after steps, after epochs or both.* and every_n_epochs=-1"),
        ({"every_n_epochs": 0}, "after steps, after epochs or both.* and every_n_epochs=0"),
        ({"grace_period": -1.0}, "grace_period must be positive"),
        ({"hang_timeout": 0}, "hang_timeout must be positive, or None"),
        ({"format": "both"}, "format must be one of 'single', 'sharded'; got 'both'"),
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
    ],
)
def test_settings_of_a_model_checkpoint(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticRestart(tmp_path, **settings)


def test_a_folder_has_to_be_given() -> None:
    with pytest.raises(ValueError, match="dirpath must be the folder of the checkpoints"):
        ElasticRestart("")


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


def test_a_schedule_of_accumulation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="GradientAccumulationScheduler cannot take effect"):
        fit(tmp_path, GradientAccumulationScheduler({0: 2}))


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
    import lightning as L

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AsyncCheckpoint(tmp_path / "ckpt", every_n_train_steps=2)],
    )
    trainer.fit(Net(), make_loader())
    with pytest.raises(ValueError, match=r"was not saved under ElasticRestart.*use another folder"):
        fit(tmp_path)


def test_a_folder_that_another_callback_saves_into(tmp_path: Path) -> None:
    beside = AsyncCheckpoint(tmp_path / "ckpt", save_last=True)
    with pytest.raises(ValueError, match=r"AsyncCheckpoint saves into .*ckpt too.*dirpath="):
        fit(tmp_path, beside)


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


def test_an_explicit_checkpoint_begins_a_run_and_does_not_take_it_back(tmp_path: Path) -> None:
    broken_off(tmp_path / "first")
    begin = str(next((tmp_path / "first" / "ckpt").glob("*step=4.ckpt")))
    with pytest.raises(Fault):
        fit(tmp_path / "second", FailAt("on_after_backward", 11), ckpt_path=begin)
    trainer, _ = fit(tmp_path / "second", ckpt_path=begin)
    assert trainer.global_step == 36
    steps = (tmp_path / "second" / "account" / "rank-0.jsonl").read_text().splitlines()
    assert len(steps) == (11 - 4) + (36 - 10), "the second start went on at step 10, not 4"
