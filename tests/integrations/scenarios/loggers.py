"""What arrives at loggers."""

from __future__ import annotations

import csv
import importlib.util
import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_dist import CommProfiler, CompressionError, ExchangedVolume
from scenarios.catalogue import Facts, folder, rank, scenario
from scenarios.fitting import compressed, make_trainer


class OneMatrix(L.LightningModule):
    """4096 elements in one tensor: 16 blocks of int8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(64, 64, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, 64), batch_size=1)


def _rows(logger: CSVLogger) -> list[Facts]:
    """Rows with ``comm/`` columns, on rank 0."""
    if rank() != 0 or not os.path.exists(logger.experiment.metrics_file_path):
        return []
    with open(logger.experiment.metrics_file_path, newline="") as file:
        rows = [{k: v for k, v in row.items() if v != ""} for row in csv.DictReader(file)]
    return [
        {k: float(v) for k, v in row.items()} for row in rows if "comm/compression_ratio" in row
    ]


@scenario
def csv_logger() -> Facts:
    facts: Facts = {}
    for name, every in {"every step": 1, "every second": 2, "never": 0}.items():
        logger = CSVLogger(folder(), name=name)
        trainer = make_trainer(compressed(), max_epochs=1, logger=logger, log_every_n_steps=every)
        trainer.fit(OneMatrix())
        facts[name] = _rows(logger)
        facts[f"{name} stats"] = dict(trainer.strategy.comm_stats())
    return facts


@scenario
def csv_logger_two_fits() -> Facts:
    logger, model = CSVLogger(folder(), name="two fits"), OneMatrix()
    trainer = make_trainer(compressed(), max_epochs=1, logger=logger)
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    return {"rows": _rows(logger)}


class Measured(OneMatrix):
    """Logs its compression with metrics; ranks have batches of their own, and two make a step."""

    def __init__(self, profiler: CommProfiler) -> None:
        super().__init__()
        self.profiler = profiler
        self.volume, self.ratio = ExchangedVolume(), ExchangedVolume(ratio=True)
        self.error = CompressionError()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(97 * rank() + batch_idx)
        return super().training_step(batch * torch.randn(64, generator=generator), batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        for metric in (self.volume, self.ratio):
            metric.update(self.trainer.strategy.comm_stats())
        self.error.update(self.profiler.errors)
        logged = {"volume": self.volume, "ratio": self.ratio, "error": self.error}
        for name, metric in logged.items():
            self.log(name, metric, on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.epochs = [*getattr(self, "epochs", []), len(self.profiler.errors)]


@scenario
def metrics_in_log() -> Facts:
    profiler = CommProfiler(
        dirpath=folder() / "metrics_in_log",
        max_overhead=1,
        error_every_n_steps=1,
        measure_links=False,
        predict=False,
        html=False,
        trace=False,
        print_summary=False,
    )
    logger = CSVLogger(folder(), name="metrics in log")
    trainer = make_trainer(
        compressed(),
        max_epochs=2,
        logger=logger,
        callbacks=[profiler],
        accumulate_grad_batches=2,
        log_every_n_steps=100,
    )
    trainer.fit(module := Measured(profiler))
    rows: list[Facts] = []
    if rank() == 0:
        with open(logger.experiment.metrics_file_path, newline="") as file:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return {
        "rows": [row for row in rows if "volume" in row],
        "stats": dict(trainer.strategy.comm_stats()),
        "errors": [each.relative_l2 for each in profiler.errors],
        "of epochs": module.epochs,
    }


@scenario
def wandb_logger() -> Facts:
    if importlib.util.find_spec("wandb") is None:
        return {"missing": True}
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(project="tests", offline=True, save_dir=folder())
    trainer = make_trainer(compressed(), max_epochs=1, logger=logger)
    trainer.fit(OneMatrix())
    if rank() != 0:
        return {}
    summary = {k: v for k, v in dict(logger.experiment.summary).items() if k.startswith("comm/")}
    logger.experiment.finish()
    return {"summary": summary}
