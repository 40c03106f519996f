"""Trainings that stop early, go on longer, fail and are used again; other callbacks beside."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from elastic_data import Stream
from elastic_runs import FailAt, Fault, Net, committed, fit, hash_of, make_loader
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader

from lightning_dist.elastic.progress import KEY
from lightning_dist.integrations.lightning.elastic.connectors import Preempted


def ids_of(folder: Path) -> list[list[int]]:
    return [step.ids for step in committed(folder / "account").values()]


class SavesByItself(L.Callback):
    """Comes before ElasticRestart, as a user's callbacks do."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "own.ckpt")


def test_the_position_in_a_checkpoint_of_somebody_else(tmp_path: Path) -> None:
    fit(tmp_path / "one", SavesByItself(), default_root_dir=tmp_path)
    state = torch.load(tmp_path / "own.ckpt", weights_only=False)[KEY]
    assert (state["total_steps"], state["position"]["steps"]) == (4, 4)
    fit(tmp_path / "two", ckpt_path=str(tmp_path / "own.ckpt"))
    assert ids_of(tmp_path / "two") == ids_of(tmp_path / "one")[4:]


class LogsStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", float(self.current_epoch))
        return super().training_step(batch, batch_idx)


def test_a_metric_called_step_hides_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Fault):
        fit(tmp_path, FailAt("on_after_backward", 11), module=LogsStep())
    fit(tmp_path, module=LogsStep())
    start = json.loads((tmp_path / "ckpt/elastic/rank-0.jsonl").read_text().splitlines()[2])
    assert start["samples"] == 40, "step 10"


def test_more_steps_go_on_within_the_epoch(tmp_path: Path) -> None:
    fit(tmp_path / "whole", max_steps=24, max_epochs=-1)
    fit(tmp_path / "parts", max_steps=17, max_epochs=-1)
    fit(tmp_path / "parts", max_steps=24, max_epochs=-1)
    assert ids_of(tmp_path / "parts") == ids_of(tmp_path / "whole")


def test_an_early_stop_is_kept(tmp_path: Path) -> None:
    def stop() -> EarlyStopping:
        return EarlyStopping("score", patience=0, mode="max", min_delta=100.0)

    trainer, module = fit(tmp_path, stop(), max_epochs=9)
    assert trainer.global_step < 9 * 12
    again, same = fit(tmp_path, stop(), max_epochs=9)
    assert again.global_step == trainer.global_step
    assert hash_of(same) == hash_of(module)


def test_a_branch_is_a_run_of_its_own(tmp_path: Path) -> None:
    fit(tmp_path / "one", max_epochs=1)
    begin = str(next((tmp_path / "one" / "ckpt").glob("*.ckpt")))
    fit(tmp_path / "two", max_epochs=2, ckpt_path=begin)
    runs = {
        json.loads((tmp_path / name / "ckpt/elastic/rank-0.jsonl").read_text().splitlines()[0])[
            "run_id"
        ]
        for name in ("one", "two")
    }
    assert len(runs) == 2


def test_another_seed_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    with pytest.raises(ValueError, match=r"seed=6 cannot take effect.* of seed 5"):
        fit(tmp_path, max_epochs=2, elastic={"seed": 6})


def test_a_trainer_is_as_it_was_after_a_fit_that_failed(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    trainer, _ = fit(tmp_path, max_epochs=1, limit_train_batches=3, module=Counts())
    trainer.fit_loop.max_epochs = 2
    fails = FailAt("on_after_backward", 4)
    trainer.callbacks.insert(0, fails)
    with pytest.raises(Fault):
        trainer.fit(Counts(), make_loader())
    assert trainer.limit_train_batches == 3
    trainer.callbacks.remove(fails)
    seen.clear()
    trainer.fit(Counts(), make_loader(batch_size=2))
    assert set(seen) <= {1, 2}, "the second loader, with the global batch of the first"


class DrawingStream(Stream):
    def iter_shard(self, *, epoch: int, start: int, step: int) -> Any:
        for index, x in super().iter_shard(epoch=epoch, start=start, step=step):
            yield index, x + 0.1 * torch.rand(())


def test_a_stream_that_draws_goes_on_with_what_it_would_have_drawn(tmp_path: Path) -> None:
    def loader() -> DataLoader:
        return DataLoader(DrawingStream(), batch_size=4)

    _, whole = fit(tmp_path / "whole", loader=loader, max_epochs=2)
    with pytest.raises(Fault):
        fit(tmp_path / "parts", FailAt("on_after_backward", 7), loader=loader, max_epochs=2)
    _, resumed = fit(tmp_path / "parts", loader=loader, max_epochs=2)
    assert hash_of(resumed) == hash_of(whole)


class EndsEpochs(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


def test_epochs_that_a_module_ends_have_their_checkpoint(tmp_path: Path) -> None:
    settings = {"elastic": {"every_n_train_steps": None}}
    with pytest.raises(Fault):
        fit(tmp_path, FailAt("on_after_backward", 12), module=EndsEpochs(), **settings)
    trainer, _ = fit(tmp_path, module=EndsEpochs(), **settings)
    start = json.loads((tmp_path / "ckpt/elastic/rank-0.jsonl").read_text().splitlines()[2])
    assert start["samples"] == 2 * 5 * 4
    assert trainer.global_step == 15


def test_a_training_in_a_thread_hears_its_cloud(tmp_path: Path) -> None:
    ended: list[BaseException] = []

    def train() -> None:
        try:
            fit(
                tmp_path,
                elastic={"preemption_check": lambda: True, "preemption_poll_interval": 0.01},
                max_epochs=1000,
            )
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(60)
    assert [type(error) for error in ended] == [Preempted]
