"""Workers of loaders under ElasticRestart: their seeds, and signals that reach them."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from elastic_data import LOADERS
from elastic_runs import Net, fit, make_loader
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_dist.elastic.data.workers import EndsAtSecondSignal
from lightning_dist.integrations.lightning.elastic.connectors import KeptSource


def test_workers_have_the_seeds_of_seed_everything(tmp_path: Path) -> None:
    L.seed_everything(3, workers=True)
    trainer, _ = fit(
        tmp_path, loader=lambda: make_loader(num_workers=1), max_epochs=1, validate=False
    )
    begin = trainer.train_dataloader.worker_init_fn
    assert isinstance(begin, EndsAtSecondSignal)
    assert isinstance(begin.usual, partial)
    assert begin.usual.func is pl_worker_init_function


class TellsWorkers(L.Callback):
    """Sends all workers of this process a signal, as a launcher does, in one hook of one epoch."""

    def __init__(self, hook: str, epoch: int = 0) -> None:
        self.told: list[int] = []
        others = {each.pid for each in multiprocessing.active_children()}  # of an earlier test

        def tell(trainer: L.Trainer, *_: Any, **__: Any) -> None:
            if trainer.sanity_checking or trainer.current_epoch != epoch or self.told:
                return
            pids = {worker.pid for worker in multiprocessing.active_children()} - others
            self.told = [pid for pid in pids if pid]
            subprocess.run(["kill", "-TERM", *map(str, self.told)], check=True)

        setattr(self, hook, tell)


class Validated(Net):
    """Has a validation loader with workers."""

    def __init__(self, **loader: Any) -> None:
        super().__init__()
        self.of_loader = loader

    def val_dataloader(self) -> DataLoader:
        return make_loader(shuffle=False, num_workers=1, **self.of_loader)


@pytest.mark.parametrize(
    ("loader", "settings"),
    [
        ({}, {"check_val_every_n_epoch": 2}),
        ({}, {"reload_dataloaders_every_n_epochs": 1}),
        ({"persistent_workers": True}, {"num_sanity_val_steps": 1}),
    ],
    ids=["made at the first validation", "made anew", "begun by the sanity check"],
)
def test_a_validation_outlives_a_signal(
    loader: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    tells = TellsWorkers("on_validation_batch_end", epoch=1)
    trainer, _ = fit(
        tmp_path, tells, module=Validated(**loader), validate=False, max_epochs=2, **settings
    )
    assert (trainer.global_step, len(tells.told)) == (24, 1)


def test_a_stateful_loader_of_a_stream_outlives_a_signal(tmp_path: Path) -> None:
    tells = TellsWorkers("on_train_batch_end")
    loader = LOADERS["stateful stream, worker"]
    trainer, _ = fit(tmp_path, tells, loader=loader, validate=False, max_epochs=1)
    assert (trainer.global_step, len(tells.told)) == (12, 1)


@pytest.mark.parametrize(
    "several",
    [
        lambda *loaders: list(loaders),
        lambda *loaders: dict(zip("ab", loaders, strict=True)),
        lambda *loaders: CombinedLoader(list(loaders), "sequential"),
    ],
    ids=["list", "dict", "CombinedLoader"],
)
def test_each_of_several_loaders_is_kept(several: Callable[..., Any]) -> None:
    loaders = [make_loader(num_workers=1), make_loader(num_workers=1)]
    usual = _DataLoaderSource(several(*loaders), "train_dataloader")
    given = KeptSource(usual, trainer=L.Trainer(logger=False, accelerator="cpu")).dataloader()
    assert given is usual.instance
    assert all(isinstance(loader.worker_init_fn, EndsAtSecondSignal) for loader in loaders)


def test_the_trainers_own_sources_are_given_back(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, max_epochs=1)
    assert type(trainer.fit_loop._data_source) is _DataLoaderSource
    assert type(trainer.fit_loop.epoch_loop.val_loop._data_source) is _DataLoaderSource
