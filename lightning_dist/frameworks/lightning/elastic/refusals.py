"""Settings that ElasticRestart refuses, before a fit begins."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)

from lightning_dist.checkpoint.reading import require_loadable
from lightning_dist.frameworks.lightning.checkpoint.async_checkpoint import AsyncCheckpoint
from lightning_dist.frameworks.lightning.checkpoint.private import checkpoint_folder
from lightning_dist.frameworks.lightning.elastic import private
from lightning_dist.frameworks.lightning.elastic.data import TrainerDeal

FINDERS = (BatchSizeFinder, LearningRateFinder)
"""Callbacks that train a little and restore what they found: as such, or for a ``Tuner``."""


def require_plain_trainer(trainer: pl.Trainer) -> None:
    """Raise a ValueError for settings that ElasticRestart could not keep over a restart."""
    if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
        raise ValueError(
            "ElasticRestart uses every sample once per epoch, so overfit_batches cannot take "
            "effect; set overfit_batches=0, or leave ElasticRestart out"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            raise ValueError(
                "ElasticRestart decides how many micro-batches a step takes, so a "
                "GradientAccumulationScheduler cannot take effect; set accumulate_grad_batches="
            )
        if isinstance(callback, FINDERS):
            name = type(callback).__name__
            raise ValueError(
                f"ElasticRestart resumes from a checkpoint at every start, and {name} would search "
                "again there and restore a checkpoint of its own over it; search before fit(), "
                "with a Tuner(trainer), and leave the callback out"
            )


def require_recoverable_fit(trainer: pl.Trainer, data: TrainerDeal) -> None:
    """Raise a ValueError for a fit whose steps cannot be taken again where a rank is lost."""
    optimizers: Any = trainer.optimizers
    kinds = [type(each).__name__ for each in optimizers]
    wrong = {
        f"{len(kinds)} optimizers": len(kinds) != 1,
        "automatic_optimization=False": not trainer.lightning_module.automatic_optimization,
        "a GradScaler under a Trainer": getattr(trainer.precision_plugin, "scaler", None)
        is not None,
        "LBFGS, which computes gradients several times in a step": "LBFGS" in kinds,
        "a train dataloader whose samples cannot be resharded": not data.is_dealt,
    }
    sharded = [each for each in trainer.checkpoint_callbacks if _is_sharded(each)]
    wrong["a checkpoint with format='sharded', which all of the first ranks write"] = bool(sharded)
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(
                f"recovery='in_process' does not support {what}; use recovery='restart'"
            )


def _is_sharded(callback: Any) -> bool:
    return isinstance(callback, AsyncCheckpoint) and callback.settings.sharded


def is_trial(trainer: pl.Trainer) -> bool:
    """Whether this fit is not of the run: ``fast_dev_run``, or the search of a ``Tuner``."""
    inner: Any = trainer
    searches = (each for each in inner.callbacks if isinstance(each, FINDERS))
    return bool(inner.fast_dev_run) or any(map(private.is_searching, searches))


def require_own_folder(trainer: pl.Trainer, own: str) -> None:
    """Raise ValueError if another callback saves into the folder ``own``."""
    for other in trainer.checkpoint_callbacks:
        if isinstance(other, ModelCheckpoint) and (checkpoint_folder(other, trainer) == own):
            raise ValueError(
                f"{type(other).__name__} saves into {own} too, and a start could resume from its "
                "checkpoints; give it a folder of its own with dirpath="
            )


def refuse_choices(arguments: Mapping[str, Any], of: object) -> None:
    """Raise ValueError for arguments of a ModelCheckpoint."""
    if taken := sorted(arguments.keys() & signature(ModelCheckpoint).parameters.keys()):
        raise ValueError(
            f"ElasticRestart keeps the newest checkpoints (max_to_keep=), so {', '.join(taken)} "
            "cannot take effect; add an AsyncCheckpoint with a folder of its own for the best"
        )


def require_loadable_hparams(trainer: pl.Trainer) -> None:
    """Raise ValueError for what ``save_hyperparameters`` keeps and no start could load."""
    inner: Any = trainer
    for each in (trainer.lightning_module, inner.datamodule):
        hparams = getattr(each, "hparams", None)
        if hparams:
            name = f"{type(each).__name__}.hparams"
            plain = dict(hparams) if isinstance(hparams, dict) else hparams
            require_loadable(plain, name=name)
