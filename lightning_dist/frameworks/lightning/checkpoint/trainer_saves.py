"""Snapshots of a trainer, what cannot be saved of one, and messages when they are complete."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)

from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.checkpoint.saves import Saves, committed_line
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.checkpoint import private
from lightning_dist.frameworks.lightning.checkpoint.resume import ResumeCheckpointIO
from lightning_dist.frameworks.lightning.checkpoint.session_io import CheckpointerIO
from lightning_dist.frameworks.lightning.model_parallel import SyncModelParallelStrategy
from lightning_dist.settings.run import CheckpointSettings

_AVERAGING = tuple(
    getattr(of_lightning, name)
    for name in ("StochasticWeightAveraging", "WeightAveraging")
    if hasattr(of_lightning, name)  # the second came with Lightning 2.6
)
_OWN_FORMAT = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)


def require_supported(strategy: Strategy, *, sharded: bool) -> None:
    """Raise ValueError for strategies whose checkpoints do not pass through a CheckpointIO.

    Args:
        sharded: whether every rank writes its part.
    """
    name = type(strategy).__name__
    if isinstance(strategy, SyncModelParallelStrategy):
        if not sharded:
            raise ValueError(
                f"{name} keeps a part of the model on each rank, and format='single' would need "
                "all of it on rank 0; set format='sharded' (lightning-dist ckpt consolidate makes "
                "one file of it)"
            )
    elif isinstance(strategy, _OWN_FORMAT):
        raise ValueError(
            f"AsyncCheckpoint writes what every rank has in full, and {name} keeps a part of the "
            "model on each rank and writes it in a format of its own; use ModelCheckpoint with it"
        )
    io = type(strategy.checkpoint_io)
    if io not in (TorchCheckpointIO, ResumeCheckpointIO):
        raise ValueError(
            f"AsyncCheckpoint writes its checkpoints itself, so {io.__name__} cannot take effect; "
            "leave that plugin out, or use ModelCheckpoint with it"
        )


def require_effective(settings: CheckpointSettings, trainer: pl.Trainer) -> None:
    """Raise ValueError if the callbacks of ``trainer`` leave ``snapshot="overlap"`` no effect."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if settings.snapshot == "overlap" and isinstance(callback, _AVERAGING):
            raise ValueError(
                f"{type(callback).__name__} may change the weights at any time, so snapshots are "
                "copied at once and snapshot='overlap' cannot take effect; set snapshot='auto'"
            )


def weights_may_change(trainer: pl.Trainer) -> bool:
    """Whether parameters may be written before the next optimizer step, by something else.

    At the end of an epoch and of the training callbacks and modules do what they like with the
    weights; averaging callbacks do so at any time.
    """
    module: Any = trainer.lightning_module
    # ModelCheckpoint puts `saved_models` into `layer`, saves, and takes it out again.
    swapped = not module.automatic_optimization and hasattr(module, "saved_models")
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    averaged = any(isinstance(callback, _AVERAGING) for callback in callbacks)
    ends = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or trainer.should_stop
    done = trainer.max_steps is not None and 0 <= trainer.max_steps <= trainer.global_step
    return swapped or averaged or ends or done


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
    saves.open(folder, together=sharded)
    saves.watch(trainer.strategy.optimizers)  # others, if a module has put others there
    _save(trainer, saves, path, sharded=sharded, weights_only=weights_only)
    if at_once:
        saves.checkpointer.wait_for_copy()
    saves.metrics.blocking_ms = saves.blocking[path] = (time.perf_counter() - began) * 1e3


def _save(
    trainer: pl.Trainer, saves: Saves, path: str, *, sharded: bool, weights_only: bool
) -> None:
    strategy, checkpointer = trainer.strategy, saves.checkpointer if saves.writes else None
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
