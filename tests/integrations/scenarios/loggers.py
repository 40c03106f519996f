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
