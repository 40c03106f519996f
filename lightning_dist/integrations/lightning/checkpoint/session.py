"""The checkpoints of one fit: a checkpointer where this rank writes, decisions on all ranks."""

from __future__ import annotations

import time
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from weakref import proxy

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.folder_owner import is_owned
from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.checkpoint.metrics import Metrics
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.integrations.lightning.checkpoint.bookkeeping import Outcomes, Scores
from lightning_dist.integrations.lightning.checkpoint.find_last import cannot_open
from lightning_dist.integrations.lightning.checkpoint.report import drain, line, log_metrics
from lightning_dist.integrations.lightning.checkpoint.session_io import save_into


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
        self._removals: list[str] = []  # of this trigger
        self._has_saved = False
        self._pending_deletions: set[str] = set()  # files that stay for now, but not for a user
        self._watched: list[Optimizer] = []
        self._outcomes = Outcomes(self, settings, callback=callback, trainer=trainer)
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
        try:
            self._open(folder)
        except BaseException:
            if self._checkpointer is not None:
                self._checkpointer.close()
            raise

    def _open(self, folder: str) -> None:
        if find_spec("omegaconf") is not None:  # Lightning would import it within the first save
            import_module("omegaconf")
        problem = self._try_to_open(folder) if self._trainer.is_global_zero else ""
        if problem := self._trainer.strategy.broadcast(problem):
            raise ValueError(problem)
        if not self._sharded:
            return
        if not self._all(self._trainer.is_global_zero or is_owned(folder)):
            raise ValueError(
                f"with format='sharded' all ranks write to one folder, and some do not see rank "
                f"0's {folder}; put it on a filesystem that all hosts mount, or use format='single'"
            )
        problem = "" if self._trainer.is_global_zero else self._try_to_open(folder)
        if not self._all(not problem):
            raise ValueError(problem or f"no checkpoints can be written to {folder} by some ranks")

    def _all(self, fine: bool) -> bool:
        return bool(self._trainer.strategy.reduce_boolean_decision(fine, all=True))

    def _try_to_open(self, folder: str) -> str:
        try:
            if self._checkpointer is not None:
                self._checkpointer.open(folder)
        except (ValueError, OSError, CheckpointError) as error:
            return cannot_open(folder, error)
        return ""

    def watch_optimizers(self) -> None:
        """Know the optimizers; other ones if a module has put others in their place."""
        optimizers = list(self._trainer.strategy.optimizers)
        if self._checkpointer is not None and [*map(id, optimizers)] != [*map(id, self._watched)]:
            self._checkpointer.wait_for_copy()
            self._checkpointer.watch(optimizers)
            self._watched = optimizers

    def save(self, path: str, *, weights_only: bool, at_once: bool) -> None:
        """Take a snapshot of the training. On all ranks.

        Args:
            at_once: all of it, for something may change the weights before the next step.
        """
        began, trainer = time.perf_counter(), self._trainer
        self.watch_optimizers()
        save_into(
            self._checkpointer, trainer, path, sharded=self._sharded, weights_only=weights_only
        )
        self._has_saved = True
        if self._checkpointer is not None and at_once:
            self._checkpointer.wait_for_copy()
        self.metrics.stall_s = time.perf_counter() - began
        if self._checkpointer is not None:
            self._stalls[path] = self.metrics.stall_s

    def link(self, source: str, target: str, *, symbolic: bool = False) -> None:
        """Show ``source`` as ``target`` too, unless it has that name anyway."""
        first = self._checkpointer is not None and self._checkpointer.is_first
        if first and source != target:
            assert self._checkpointer is not None
            self._checkpointer.link(source, target, symbolic=symbolic)

    def remove(self, path: str) -> None:
        """Remove ``path`` after this trigger's link is made: `last` may still be what it is."""
        self._removals.append(path)
        self._pending_deletions.add(path)

    def flush_removals(self) -> None:
        """Ask for them, once there is a save behind which they are done."""
        if not self._has_saved:
            return
        removals, self._removals = self._removals, []
        if self._checkpointer is None or not self._checkpointer.is_first:
            self._pending_deletions = set()
            return
        for path in removals:
            self._checkpointer.remove(path)
        self._pending_deletions = set(
            filter(self._checkpointer.is_removing, self._pending_deletions)
        )

    def keep(self, path: str) -> None:
        """Do not remove ``path`` after all."""
        self._pending_deletions.discard(path)
        self._removals = [each for each in self._removals if each != path]
        if self._checkpointer is not None and self._checkpointer.is_first:
            self._checkpointer.keep(path)

    def is_pending_deletion(self, path: str) -> bool:
        """Whether ``path`` is there only until a later checkpoint is."""
        return path in self._pending_deletions

    def claim(self, path: str) -> None:
        """``path`` is about to be written, so it is not going any more."""
        self._pending_deletions.discard(path)
        self._removals = [each for each in self._removals if each != path]

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
            CheckpointError: some have failed, on rank 0, and ``on_error`` says so.
        """
        self._collect()
        self._outcomes.raise_fatal(self.last_committed)

    def agree_on_failures(self) -> None:
        """Tell all ranks what could not be written: all raise, or all forget it. Collective.

        Raises:
            CheckpointError: on all ranks; it names all that failed.
        """
        self._collect()
        self._outcomes.agree(self.last_committed)

    def note_displaced(self, path: str, *, before: Scores, after: Scores) -> None:
        """See :meth:`.Displaced.note`."""
        self._outcomes.displaced.note(path, before=before, after=after)

    def drain(self, timeout: float | None = None) -> None:
        """Wait until everything is written, linked and removed; a bar if it takes long."""
        if self._checkpointer is not None:
            drain(self._checkpointer, show=self._trainer.is_global_zero, timeout=timeout)
            self._collect()

    def close(self, timeout: float | None = None) -> None:
        """Drain, say what failed and has not been said, and end the writer.

        Args:
            timeout: seconds after which the writer is left to itself.
        """
        if self._checkpointer is None:
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        with suppress(TimeoutError):
            self.drain(timeout)
        self._collect()
        self._outcomes.warn(self.last_committed)
        try:
            left = None if deadline is None else max(deadline - time.monotonic(), 1.0)
            self._checkpointer.close(left)
        except CheckpointError as error:
            if deadline is None:
                raise
            rank_zero_warn(f"the training ends before its checkpoints are complete: {error}")

    def _collect(self) -> None:
        if self._checkpointer is None:
            return
        for event in self._checkpointer.poll():
            self._outcomes.add(event)
            stall_s = self._stalls.pop(event.target, 0.0)
            if isinstance(event, Committed) and self._trainer.is_global_zero:
                self._announce(self._checkpointer, event, stall_s=stall_s)

    def _announce(self, checkpointer: Checkpointer, event: Committed, *, stall_s: float) -> None:
        rank_zero_info(line(event, stall_s=stall_s))
        step = max(self._trainer.global_step - 1, 0)
        log_metrics(self._trainer.loggers, checkpointer, step=step)
        callback: Any = proxy(self._callback)
        for logger in self._trainer.loggers:
            logger.after_save_checkpoint(callback)
