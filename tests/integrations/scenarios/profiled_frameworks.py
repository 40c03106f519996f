"""Runs of Lightning, Fabric and Accelerate."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from profiled_common import STEPS, busy, network, quiet_profiler, tell
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import CommProfiler, compress_ddp
from lightning_dist.measurement import calibration
from lightning_dist.profiling.whatif import costs


class Module(L.LightningModule):
    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.net, self.fails_at = network(), fails_at

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise ArithmeticError("the loss is odd")
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        busy(0.02)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(96, 256)), batch_size=4)


def fit(folder: Path, profiler: CommProfiler, **settings: Any) -> L.Trainer:
    module = settings.pop("module", None) or Module(settings.pop("fails_at", -1))
    trainer = L.Trainer(
        **{
            "strategy": "compressed_ddp",
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 2,
            "log_every_n_steps": 5,
            "limit_val_batches": 2,
            "default_root_dir": folder,
            "callbacks": [profiler],
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "logger": False,
            **settings,
        }
    )
    trainer.fit(module, loader(), loader())
    return trainer


def lightning(folder: Path, *, strategy: str) -> None:
    loggers = [CSVLogger(folder, name="csv", version=0)]
    if strategy == "compressed_ddp":
        loggers.append(WandbLogger(save_dir=folder, offline=True, id="profiled"))
    profiler = CommProfiler(csv=True)
    fit(folder, profiler, strategy=strategy, logger=loggers)
    if len(loggers) > 1:
        loggers[1].experiment.finish()  # forks of multiprocessing have no atexit
    tell(folder)


class Manual(Module):
    """Its passes and steps are its own: an optimizer for each half, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        for half, optimizer in zip((self.net[:2], self.net[2:]), self.optimizers(), strict=True):
            loss = half(batch[0]).square().mean()
            self.manual_backward(loss)
            busy(0.002)
            optimizer.step()
            optimizer.zero_grad()
        busy(0.01)

    def configure_optimizers(self) -> Any:
        halves = self.net[:2], self.net[2:]
        return [torch.optim.SGD(half.parameters(), lr=0.01) for half in halves]


def lightning_manual(folder: Path, *, strategy: str) -> None:
    profiler = quiet_profiler(dirpath=folder)
    trainer = fit(folder, profiler, module=Manual(), strategy=strategy)
    tell(folder, steps=trainer.global_step)


def lightning_predicted(folder: Path) -> None:
    """As if the training had been long enough for what codecs cost to be measured."""
    costs.LEAST_TRAINING, costs.LARGEST_SHARE = 0.0, 1e3
    calibration._UNITS = 1  # quickly
    fit(folder, CommProfiler(html=False), strategy="ddp")
    tell(folder)


def lightning_failing(folder: Path) -> None:
    try:
        fit(folder, CommProfiler(), fails_at=9)
    except ArithmeticError:
        tell(folder)


def lightning_told_to_end(folder: Path) -> None:
    class Told(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 9:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        fit(folder, CommProfiler(), module=Told())
    except SystemExit:
        tell(folder)


def fabric(folder: Path) -> None:
    fabric = L.Fabric(strategy="compressed_ddp", accelerator="cpu", devices=2)
    fabric.launch()
    model = fabric.setup_module(network())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
    with quiet_profiler(model, dirpath=folder, predict=False):
        for _ in range(STEPS):
            fabric.backward(model(torch.ones(4, 256)).sum())
            optimizer.step()
            optimizer.zero_grad()
    tell(folder)


def accelerate(folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(
        module := network(), torch.optim.SGD(module.parameters(), lr=0.01)
    )
    compress_ddp(model, "int8", compile_kernels=False)
    with quiet_profiler(model, dirpath=folder):
        for _ in range(STEPS):
            accelerator.backward(model(torch.ones(4, 256)).sum())
            optimizer.step()
            optimizer.zero_grad()
    tell(folder)


def local_updates(folder: Path) -> None:
    """Local steps of four in an Accelerator's loop; rank 1 comes late to every exchange."""
    from accelerate import Accelerator

    from lightning_dist.accelerate import local_updates

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(
        module := network(), torch.optim.SGD(module.parameters(), lr=0.01)
    )
    updates = local_updates(accelerator, model, optimizer, sync_every=4)
    with quiet_profiler(model, dirpath=folder):
        for step in range(STEPS):
            accelerator.backward(model(torch.ones(4, 256)).sum())
            optimizer.step()
            optimizer.zero_grad()
            busy(0.25 if step % 4 == 3 and dist.get_rank() == 1 else 0.0)
            updates.step()
    updates.close()
    tell(folder)


def lightning_local(folder: Path) -> None:
    fit(folder, CommProfiler(html=False), strategy="compressed_local_sgd")
    tell(folder)


CASES: dict[str, Callable[[Path], None]] = {
    "lightning compressed_ddp": lambda folder: lightning(folder, strategy="compressed_ddp"),
    "lightning ddp": lambda folder: lightning(folder, strategy="ddp"),
    "lightning manual ddp": lambda folder: lightning_manual(
        folder, strategy="ddp_find_unused_parameters_true"
    ),
    "lightning manual int8": lambda folder: lightning_manual(
        folder, strategy="compressed_ddp_find_unused_parameters_true"
    ),
    "lightning predicted": lightning_predicted,
    "lightning failing": lightning_failing,
    "lightning told to end": lightning_told_to_end,
    "lightning local": lightning_local,
    "local updates": local_updates,
    "fabric": fabric,
    "accelerate": accelerate,
}
