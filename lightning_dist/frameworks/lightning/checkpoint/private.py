"""Private and undocumented names of Lightning that AsyncCheckpoint needs, verified on import.

Its class overrides some of ModelCheckpoint's and inherits others, which stand in the table too.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist.base.features import ASYNC_CHECKPOINT

ASYNC_CHECKPOINT.require()


# `dirpath` is set in setup(), and `ckpt_path="last"` asks before it.
def checkpoint_folder(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """The folder in which a callback keeps its checkpoints, also before its set-up."""
    found: Any = callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
    path: str = os.fspath(found)
    return path


# What it has saved may not be among the best, nor be called last.
def newest_saved(callback: ModelCheckpoint) -> str:
    """The path of the checkpoint that a callback has asked for last."""
    path: str = callback._last_checkpoint_saved
    return path


# The states of callbacks leave it out, and ranks that differ in it do not save together.
def saved(callback: ModelCheckpoint) -> tuple[Any, ...]:
    """Folder, step and path of the last save of a callback, for another rank."""
    return callback.dirpath, callback._last_global_step_saved, callback._last_checkpoint_saved


def set_saved(callback: ModelCheckpoint, saved: tuple[Any, ...]) -> None:
    """Take over what :func:`saved` has returned on another rank."""
    callback.dirpath, callback._last_global_step_saved, callback._last_checkpoint_saved = saved


# Ours, which overrides it, is static as well.
def link_checkpoint(trainer: pl.Trainer, path: str, link: str) -> None:
    """Let ``link`` be a symbolic link to the checkpoint at ``path``."""
    ModelCheckpoint._link_checkpoint(trainer, path, link)


# trainer.save_checkpoint() ends with a barrier, at which training would wait for all ranks.
def dump_checkpoint(trainer: pl.Trainer, *, weights_only: bool) -> dict[str, Any]:
    """The state of a training, as it goes into a checkpoint."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only)


# Setting `trainer.ckpt_path` would hold for later fits too.
def set_loaded_path(trainer: pl.Trainer, path: str) -> None:
    """Let ``trainer.ckpt_path`` be ``path``, until the next fit."""
    trainer._checkpoint_connector._ckpt_path = path
