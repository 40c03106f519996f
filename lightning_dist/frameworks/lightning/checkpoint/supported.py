"""Strategies and callbacks that AsyncCheckpoint supports, and times at which weights may change."""

from __future__ import annotations

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

from lightning_dist.frameworks.lightning.checkpoint.resume import ResumeCheckpointIO
from lightning_dist.frameworks.lightning.model_parallel import SyncModelParallelStrategy
from lightning_dist.settings.saving import CheckpointSettings

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
    averaged = any(isinstance(each, _AVERAGING) for each in callbacks)
    ends = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or trainer.should_stop
    done = trainer.max_steps is not None and 0 <= trainer.max_steps <= trainer.global_step
    return swapped or averaged or ends or done
