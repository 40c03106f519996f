"""Snapshots of a trainer, given to a checkpointer, and messages when they are complete."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec

import lightning.pytorch as pl

from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.checkpoint.saves import Saves, committed_line
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.checkpoint import private
from lightning_dist.frameworks.lightning.checkpoint.session_io import CheckpointerIO
from lightning_dist.frameworks.lightning.ddp import meet

if find_spec("omegaconf") is not None:  # Lightning would import it within the first save
    import_module("omegaconf")


def save_trainer(
    trainer: pl.Trainer,
    saves: Saves,
    path: str,
    *,
    folder: str,
    sharded: bool,
    at_once: bool,
    weights_only: bool = False,
) -> None:
    """Take a snapshot of a training, with what its strategy adds. On all ranks.

    Args:
        folder: of ``path``.
        sharded: see :meth:`.Checkpointer.save`.
        at_once: copy all of it, because the weights may change before the next step.
        weights_only: leave out what a training needs to resume.
    """
    began = time.perf_counter()

    def save() -> None:  # by another rank, where the one that writes is lost
        saves.open(folder, together=sharded)
        saves.watch(trainer.strategy.optimizers)  # others, if a module has put others there
        _save(trainer, saves, path, sharded=sharded, weights_only=weights_only)

    meet(trainer.strategy, save)
    if saves.checkpointer is not None and at_once:
        saves.checkpointer.wait_for_copy()
    saves.metrics.blocking_ms = saves.blocking[path] = (time.perf_counter() - began) * 1e3


def _save(
    trainer: pl.Trainer, saves: Saves, path: str, *, sharded: bool, weights_only: bool
) -> None:
    strategy, checkpointer = trainer.strategy, saves.checkpointer
    with trainer.profiler.profile("save_checkpoint"):  # type: ignore[attr-defined]
        io = CheckpointerIO(
            checkpointer, step=trainer.global_step, sharded=sharded, resumable=not weights_only
        )
        # Strategies make the content of a checkpoint, and give it to their IO.
        usual, strategy.checkpoint_io = strategy.checkpoint_io, io
        try:
            checkpoint = private.dump_checkpoint(trainer, weights_only=weights_only)
            strategy.save_checkpoint(checkpoint, path)
            if checkpointer is not None and not trainer.is_global_zero:
                io.save_checkpoint(checkpoint, path)
        finally:
            strategy.checkpoint_io = usual


def report_committed(trainer: pl.Trainer, saves: Saves, event: Committed) -> None:
    """Tell user and loggers that a checkpoint is durable; on rank 0."""
    blocking_ms = saves.blocking.pop(event.target, 0.0)
    if trainer.is_global_zero:
        rank_zero.info(committed_line(event, blocking_ms=blocking_ms))
        log_values(trainer, saves.metrics.by_name())


def log_values(trainer: pl.Trainer, values: dict[str, float]) -> None:
    """Give ``values`` to the loggers."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=max(trainer.global_step - 1, 0))
