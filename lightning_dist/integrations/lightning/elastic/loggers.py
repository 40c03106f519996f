"""Loggers that go on where they were before a restart."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from lightning_dist.integrations.lightning.private import set_tensorboard_version, set_wandb_run


def identify(trainer: pl.Trainer, *, run_id: str) -> None:
    """Give the loggers the identity that belongs to ``run_id``, before they are first used.

    A WandbLogger without ``id=`` goes on in the same run; a TensorBoardLogger without ``version=``
    in the same folder.
    """
    for number, logger in enumerate(trainer.loggers):
        name = f"{run_id}-{number}" if number else run_id
        if isinstance(logger, WandbLogger):
            set_wandb_run(logger, name)
        elif isinstance(logger, TensorBoardLogger):
            set_tensorboard_version(logger, name)
