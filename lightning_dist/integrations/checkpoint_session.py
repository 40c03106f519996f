"""The checkpoints of one fit: a checkpointer where this rank writes, decisions on all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import proxy

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist.checkpoint.checkpointer import Checkpointer, Metrics
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.folder_owner import is_owned
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.integrations.checkpoint_books import forget
from lightning_dist.integrations.checkpoint_io import failure, is_fatal
from lightning_dist.integrations.checkpoint_report import drain, line, log_metrics
from lightning_dist.integrations.checkpoint_strategies import IntoCheckpointer


class CheckpointSession:
    """From the set-up of a fit to its end.

    With one file per checkpoint only rank 0 writes; the other ranks have a session too, since they
    take part in decisions.

    Args:
        callback: the ModelCheckpoint that decides when, where and which.
        group: of all ranks, on CPU, if every rank writes its part.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        *,
        callback: ModelCheckpoint,
        trainer: pl.Trainer,
        sharded: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._settings = settings
        self._callback = callback
        self._trainer = trainer
        self._sharded = sharded
        self._failed: list[Failed] = []  # not yet known to the other ranks
        self._idle = Metrics()
        self._stalls: dict[str, float] = {}  # of the last save to each path
        self._checkpointer: Checkpointer | None = None
        if trainer.is_global_zero or sharded:
            self._checkpointer = Checkpointer(settings, group=group, ranks=trainer.world_size)

    @property
    def metrics(self) -> Metrics:
        return self._idle if self._checkpointer is None else self._checkpointer.metrics

    @property
    def last_committed(self) -> Committed | None:
        return None if self._checkpointer is None else self._checkpointer.last_committed

    def open(self, folder: str) -> None:
        """Become the one trainer that writes to ``folder``. Collective.

        Raises:
            ValueError: on all ranks, if it cannot be written to by this job.
        """
        problem = self._try_to_open(folder) if self._trainer.is_global_zero else ""
        if problem := self._trainer.strategy.broadcast(problem):
            raise ValueError(f"no checkpoints can be written to {folder}: {problem}")
        if self._sharded:
            there = self._trainer.is_global_zero or is_owned(folder)
            if not self._trainer.strategy.reduce_boolean_decision(there, all=True):
                raise ValueError(
                    f"with format='sharded' all ranks write to one folder, and some do not see "
                    f"rank 0's {folder}; put it on a filesystem that all hosts mount, or use "
                    "format='single'"
                )
            self._try_to_open(folder)

    def _try_to_open(self, folder: str) -> str:
        try:
            if self._checkpointer is not None:
                self._checkpointer.open(folder)
        except ValueError as error:
            return str(error)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def watch_optimizers(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.watch(self._trainer.strategy.optimizers)

    def save(self, path: str, *, weights_only: bool, at_once: bool) -> None:
        """Take a snapshot of the training. On all ranks.

        Args:
            at_once: all of it, for something may change the weights before the next step.
        """
        began, trainer = time.perf_counter(), self._trainer
        with trainer.profiler.profile("save_checkpoint"):  # type: ignore[attr-defined]
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only)
            with self._as_checkpoint_io() as io:
                trainer.strategy.save_checkpoint(checkpoint, path)
                if self._checkpointer is not None and not trainer.is_global_zero:
                    io.save_checkpoint(checkpoint, path)
        if self._checkpointer is not None and at_once:
            self._checkpointer.wait_for_copy()
        self.metrics.stall_s = self._stalls[path] = time.perf_counter() - began

    @contextmanager
    def _as_checkpoint_io(self) -> Iterator[IntoCheckpointer]:
        """Let the strategy add what it keeps, and save into our checkpointer."""
        strategy = self._trainer.strategy
        io = IntoCheckpointer(
            self._checkpointer, step=self._trainer.global_step, sharded=self._sharded
        )
        usual, strategy.checkpoint_io = strategy.checkpoint_io, io
        try:
            yield io
        finally:
            strategy.checkpoint_io = usual

    def link(self, source: str, target: str, *, symbolic: bool = False) -> None:
        """Show ``source`` as ``target`` too, unless it has that name anyway."""
        first = self._checkpointer is not None and self._checkpointer.is_first
        if first and source != target:
            assert self._checkpointer is not None
            self._checkpointer.link(source, target, symbolic=symbolic)

    def remove(self, path: str) -> None:
        if self._checkpointer is not None and self._checkpointer.is_first:
            self._checkpointer.remove(path)

    def is_pending(self, path: str) -> bool:
        return self._checkpointer is not None and self._checkpointer.is_pending(path)

    def must_skip(self) -> bool:
        """Whether a save would wait, and the user prefers not to. Collective."""
        if self._settings.on_busy == "wait":
            return False
        busy = self._checkpointer is not None and self._checkpointer.busy
        if not self._trainer.strategy.reduce_boolean_decision(busy, all=False):
            return False
        self.metrics.skipped += 1
        rank_zero_warn(
            f"no checkpoint at step {self._trainer.global_step}: an earlier one is still being "
            "written (on_busy='skip')"
        )
        return True

    def wait(self, timeout: float | None = None) -> None:
        if self._checkpointer is not None:
            self._checkpointer.wait(timeout)

    def deliver(self) -> None:
        """Tell user and loggers what became of saves since the last call.

        Raises:
            CheckpointError: one has failed, on rank 0, and ``on_error`` says so.
        """
        self._collect()
        raises = self._settings.on_error == "raise" and self._trainer.is_global_zero
        fatal = [event for event in self._failed if is_fatal(event)] if raises else []
        if fatal:
            self._failed.remove(fatal[0])
            raise CheckpointError(failure(fatal[0], self.last_committed))

    def agree_on_failures(self) -> None:
        """Tell all ranks what could not be written: all raise, or all forget it. Collective.

        Raises:
            CheckpointError: on all ranks.
        """
        self._collect()
        last = self.last_committed
        found = [(e.target, failure(e, last), is_fatal(e)) for e in self._failed]
        self._failed = []
        is_gone = bool(found) and self._last_is_gone()
        found, kept, is_gone = self._trainer.strategy.broadcast(
            (found, last.target if last else "", is_gone)
        )
        for target, message, fatal in found:
            if fatal and self._settings.on_error == "raise":
                raise CheckpointError(message)
            rank_zero_warn(message)
            forget(self._callback, target, kept=kept)
        if is_gone:
            self._callback.last_model_path = ""

    def _last_is_gone(self) -> bool:
        """Whether nothing has the name of the last checkpoint, which failed to be the first."""
        try:
            self.wait(0)
        except TimeoutError:
            return False  # it may be about to be there
        path = self._callback.last_model_path
        return bool(path) and not self._callback._fs.exists(path)

    def drain(self) -> None:
        """Wait until everything is written, linked and removed; a bar if it takes long."""
        if self._checkpointer is not None:
            drain(self._checkpointer, show=self._trainer.is_global_zero)
            self._collect()

    def close(self) -> None:
        """Drain, say what failed and has not been said, and end the writer."""
        if self._checkpointer is not None:
            self.drain()
            for event in self._failed:
                rank_zero_warn(failure(event, self.last_committed))
            self._checkpointer.close()

    def _collect(self) -> None:
        if self._checkpointer is None:
            return
        for event in self._checkpointer.poll():
            if isinstance(event, Failed):
                self._failed.append(event)
            elif self._trainer.is_global_zero:
                self._announce(self._checkpointer, event)

    def _announce(self, checkpointer: Checkpointer, event: Committed) -> None:
        rank_zero_info(line(event, stall_s=self._stalls.get(event.target, 0.0)))
        step = max(self._trainer.global_step - 1, 0)
        log_metrics(self._trainer.loggers, checkpointer, step=step)
        callback: Any = proxy(self._callback)
        for logger in self._trainer.loggers:
            logger.after_save_checkpoint(callback)


def folder_of(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """Where ``callback`` keeps its checkpoints, also before its set-up."""
    return os.fspath(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
