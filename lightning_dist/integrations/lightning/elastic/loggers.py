"""Loggers that go on where they were before a restart."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger


def identify(trainer: pl.Trainer, *, run_id: str) -> None:
    """Give the loggers the identity that belongs to ``run_id``, before they are first used.

    A WandbLogger without ``id=`` goes on in the same run; a TensorBoardLogger without ``version=``
    in the same folder.
    """
    for number, logger in enumerate(trainer.loggers):
        name = f"{run_id}-{number}" if number else run_id
        if isinstance(logger, WandbLogger):
            _identify_wandb(logger, name)
        elif isinstance(logger, TensorBoardLogger) and logger._version is None:
            logger._version = name


def _identify_wandb(logger: Any, name: str) -> None:
    init = logger._wandb_init
    if logger._experiment is None and init.get("id") is None:
        init["id"] = logger._id = name
        init["resume"] = "allow"
