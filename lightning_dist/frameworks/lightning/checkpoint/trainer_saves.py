"""Saves of a trainer: how long they block training, and messages when they are complete."""

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


class TrainerSaves:
    """Snapshots of a trainer, given to a checkpointer.

    Args:
        sharded: see :meth:`.Checkpointer.save`.
    """

    def __init__(self, trainer: pl.Trainer, saves: Saves, *, sharded: bool) -> None:
        self._trainer, self._saves, self._sharded = trainer, saves, sharded
        self._blocking: dict[str, float] = {}  # of the last save to each path, in ms
        if find_spec("omegaconf") is not None:  # Lightning would import it within the first save
            import_module("omegaconf")

    def watch_optimizers(self) -> None:
        """Watch the optimizers; other ones if a module has put others in their place."""
        self._saves.watch(self._trainer.strategy.optimizers)

    def save(self, path: str, *, folder: str, at_once: bool, weights_only: bool = False) -> None:
        """Take a snapshot of the training, with what its strategy adds. On all ranks.

        Args:
            folder: of ``path``.
            at_once: copy all of it, because the weights may change before the next step.
            weights_only: leave out what a training needs to resume.
        """
        began, saves = time.perf_counter(), self._saves

        def save() -> None:  # by another rank, where the one that writes is lost
            saves.open(folder, together=self._sharded)
            self.watch_optimizers()
            self._save(path, weights_only=weights_only)

        meet(self._trainer.strategy, save)
        if saves.checkpointer is not None and at_once:
            saves.checkpointer.wait_for_copy()
        saves.metrics.blocking_ms = self._blocking[path] = (time.perf_counter() - began) * 1e3

    def _save(self, path: str, *, weights_only: bool) -> None:
        trainer, checkpointer = self._trainer, self._saves.checkpointer
        strategy = trainer.strategy
        with trainer.profiler.profile("save_checkpoint"):  # type: ignore[attr-defined]
            io = CheckpointerIO(
                checkpointer,
                step=trainer.global_step,
                sharded=self._sharded,
                resumable=not weights_only,
            )
            usual, strategy.checkpoint_io = strategy.checkpoint_io, io
            try:
                checkpoint = private.dump_checkpoint(trainer, weights_only=weights_only)
                strategy.save_checkpoint(checkpoint, path)
                if checkpointer is not None and not trainer.is_global_zero:
                    io.save_checkpoint(checkpoint, path)
            finally:
                strategy.checkpoint_io = usual

    def committed(self, event: Committed) -> None:
        """Tell user and loggers that a checkpoint is durable; on rank 0."""
        blocking_ms = self._blocking.pop(event.target, 0.0)
        if self._trainer.is_global_zero:
            rank_zero.info(committed_line(event, blocking_ms=blocking_ms))
            self.log(self._saves.metrics.by_name())

    def log(self, values: dict[str, float]) -> None:
        """Give ``values`` to the loggers."""
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=max(self._trainer.global_step - 1, 0))
