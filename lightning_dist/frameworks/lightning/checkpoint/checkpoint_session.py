"""Checkpoints of one fit: decisions on all ranks, and a ModelCheckpoint's books."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from weakref import proxy

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.saves import Saves
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.checkpoint.private import checkpoint_folder
from lightning_dist.frameworks.lightning.checkpoint.trainer_saves import (
    report_committed,
    save_trainer,
)
from lightning_dist.ranks.agreement import Facts, Ranks, destroy, new_group_of_all
from lightning_dist.settings.run import CheckpointSettings

Scores = Mapping[str, Tensor]
"""Scores of checkpoints by path."""


class PendingTopK:
    """Entries that each save removed from ``best_k_models``, until it has succeeded or failed."""

    def __init__(self) -> None:
        self._by: dict[str, dict[str, Tensor]] = {}

    def note(self, path: str, *, before: Scores, after: Scores) -> None:
        """A save of ``path`` has been asked for, and changed ``best_k_models`` so."""
        self._by[path] = {
            old: score for old, score in before.items() if old not in after or old == path
        }

    def succeed(self, path: str) -> None:
        """``path`` is there."""
        self._by.pop(path, None)

    def fail_all(self, paths: Iterable[str]) -> dict[str, Tensor]:
        """None of ``paths`` was written; what is among the best again."""
        back: dict[str, Tensor] = {}
        for path in paths:
            back.pop(path, None)
            back.update(self.fail(path))
        return back

    def fail(self, path: str) -> Scores:
        """``path`` was not written; what is among the best again."""
        back = self._by.pop(path, {})
        for displaced in self._by.values():
            if path in displaced:  # the save that displaced it would have displaced these
                del displaced[path]
                displaced.update(back)
                return {}
        return back


def forget(callback: ModelCheckpoint, path: str, *, kept: str, back: Scores | None = None) -> None:
    """Take ``path`` out of the paths that users read.

    Args:
        callback: whose paths they are.
        path: where a file should have been.
        kept: the newest checkpoint that is there, or an empty string.
        back: what is among the best again.
    """
    callback.best_k_models.pop(path, None)
    callback.best_k_models.update(back or {})
    if callback.last_model_path == path:
        callback.last_model_path = kept
    if callback.monitor is None:
        if callback.best_model_path == path:
            callback.best_model_path = kept
        return
    best, worst = (min, max) if callback.mode == "min" else (max, min)
    models = callback.best_k_models
    callback.best_model_path = best(models, key=models.__getitem__) if models else ""
    callback.best_model_score = models.get(callback.best_model_path)
    callback.kth_best_model_path = worst(models, key=models.__getitem__) if models else ""
    if models:
        callback.kth_value = models[callback.kth_best_model_path]


class CheckpointSession(Saves):
    """Saves of one fit, from its set-up to its end.

    With one file per checkpoint only rank 0 writes; the other ranks have a session too, since they
    take part in decisions.

    Args:
        callback: the ModelCheckpoint that decides when, where and which.
        sharded: whether every rank writes its part. Making the session is collective then.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        *,
        callback: ModelCheckpoint,
        trainer: pl.Trainer,
        sharded: bool,
    ) -> None:
        self._sharded, self._callback, self._trainer = sharded, callback, trainer
        self._removals: list[str] = []  # of this trigger
        self._has_saved = False
        self._committed: list[str] = []  # what the other ranks do not know of yet
        self.displaced = PendingTopK()
        self._group: dist.ProcessGroup | None = None
        if sharded and trainer.world_size > 1:
            self._group = new_group_of_all("saves")
        self._all = _TrainerRanks(trainer)
        super().__init__(
            Checkpointer(settings, group=self._group, ranks=trainer.world_size),
            ranks=self._all,
            writes=trainer.is_global_zero or sharded,
            warn=rank_zero.warn,
            ended=self._report_end,
        )

    @property
    def _first(self) -> Checkpointer | None:
        """The checkpointer of rank 0, which links and removes; None on other ranks."""
        return self.checkpointer if self._trainer.is_global_zero else None

    def begin(self, folder: str) -> None:
        """Become the one trainer that writes to ``folder``. Collective.

        Raises:
            ValueError: on all ranks, if it cannot be written to by this job.
        """
        try:
            self.open(folder, together=self._sharded)
        except BaseException:
            self._end_in_order()
            raise

    def follow(self, leader: int) -> None:
        """Go on with the present ranks, of which ``leader`` writes, into the same folder."""
        self._all.move(leader)
        self.move(self._all)

    def may_begin(self) -> bool:
        """Whether a save may begin, or is skipped; reports earlier failures. Collective.

        Raises:
            CheckpointError: see :meth:`agree_on_failures`.
        """
        by_rank = self.agree_on_failures()
        return not self.skips(by_rank, step=f" at step {self._trainer.global_step}")

    def save(self, path: str, *, weights_only: bool, at_once: bool) -> None:
        """Take a snapshot of the training. On all ranks.

        Args:
            at_once: all of it, for something may change the weights before the next step.
        """
        save_trainer(
            self._trainer,
            self,
            path,
            folder=checkpoint_folder(self._callback, self._trainer),
            sharded=self._sharded,
            at_once=at_once,
            weights_only=weights_only,
        )
        self._has_saved = True

    def link(self, source: str, target: str, *, symbolic: bool = False) -> None:
        """Show ``source`` as ``target`` too, unless it has that name anyway."""
        if self._first is not None and source != target:
            self._first.link(source, target, symbolic=symbolic)

    def remove(self, path: str) -> None:
        """Remove ``path`` after this trigger's link is made: `last` may still be what it is."""
        self._removals.append(path)

    def flush_removals(self) -> None:
        """Ask for them, once there is a save behind which they are done."""
        if self._has_saved:
            removals, self._removals = self._removals, []
            if self._first is not None:
                for path in removals:
                    self._first.remove(path)

    def keep(self, path: str) -> None:
        """Do not remove ``path`` after all."""
        self._removals = [removal for removal in self._removals if removal != path]
        if self._first is not None:
            self._first.keep(path)

    def is_pending_deletion(self, path: str) -> bool:
        """Whether ``path`` is there only until a later checkpoint is."""
        asked = self._first is not None and self._first.is_removing(path)
        return asked or path in self._removals

    def is_pending(self, path: str) -> bool:
        """Whether ``path`` is being written, or linked to."""
        return self.checkpointer.is_pending(path)

    @override
    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything is written, linked and removed; failures wait to be agreed on.

        Raises:
            TimeoutError: after ``timeout`` seconds.
        """
        self.checkpointer.wait(timeout)

    def deliver(self) -> None:
        """Report outcomes of saves since the last call to the user and loggers.

        Raises:
            CheckpointError: some have failed, on rank 0, and ``on_error`` says so.
        """
        self.poll()
        if self._trainer.is_global_zero and self._settings.on_error == "raise":
            fatal = self.take(fatal=True).values()
            self._correct([failure.target for failure in fatal])
            self.report(fatal)

    def agree_on_failures(self) -> list[Facts]:
        """Agree on what could not be written: all ranks raise, or all drop it. Collective.

        Raises:
            CheckpointError: on all ranks; it names all that failed.
        """
        self.poll()
        last, committed = self.last_committed, self._committed
        self._committed = []
        news = {"committed": committed, "last": last.target if last else ""}
        failures, by_rank = self.agree(news)
        leader = self._all.leader
        for target in by_rank[leader]["committed"]:
            self.displaced.succeed(target)
        if failures:
            targets = [failure.target for failure in failures]
            back = self._back(targets)
            # The leader knows the files, every rank the scores.
            files = self._all.of_leader(
                {"back": [*filter(_exists, back)], "gone": self._last_is_gone()}
            )
            back = {path: back[path] for path in files["back"]}
            self._forget(targets, kept=by_rank[leader]["last"], back=back)
            if files["gone"]:
                self._callback.last_model_path = ""
        self.report(failures)
        return by_rank

    def _correct(self, targets: list[str]) -> None:
        """Take what was not written out of the paths that users read, on this rank alone."""
        last = self.last_committed
        there = {path: v for path, v in self._back(targets).items() if _exists(path)}
        self._forget(targets, kept=last.target if last else "", back=there)

    def _forget(self, targets: list[str], *, kept: str, back: Scores) -> None:
        for target in targets:
            forget(self._callback, target, kept=kept, back=back if target == targets[-1] else None)

    def _back(self, targets: list[str]) -> dict[str, Tensor]:
        """Files among the best again since ``targets`` failed, if they still exist."""
        back = self.displaced.fail_all(targets)
        for path in back:
            self.keep(path)
        if back:
            self.wait()  # a later save that is under way may have removed it
        return back

    def _last_is_gone(self) -> bool:
        """Whether nothing has the name of the last checkpoint, which failed to be the first."""
        path = self._callback.last_model_path
        return bool(path) and not self.is_pending(path) and not _exists(path)

    def drain(self, timeout: float | None = None) -> None:
        """Wait until everything is written, linked and removed, and take the outcomes."""
        if self.checkpointer.busy:
            rank_zero.info("Waiting until the last checkpoint is written")
        self.checkpointer.wait(timeout)
        self.poll()

    @override
    def close(self, timeout: float | None = None) -> None:
        """Drain, warn of failures that were not reported yet, and end the writer.

        Args:
            timeout: seconds after which the writer is left to itself.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with suppress(TimeoutError):
            self.drain(timeout)
        self.poll()
        failures = self.take().values()
        self._correct([failure.target for failure in failures])
        for failure in failures:
            rank_zero.warn(failure.message)
        if deadline is None:
            self._end_in_order()
            return
        try:  # and leave the group, whose destruction would wait for a peer that hangs
            self.checkpointer.close(max(deadline - time.monotonic(), 1.0))
        except CheckpointError as error:
            rank_zero.warn(f"Training ended before its checkpoints were complete: {error}")

    def _end_in_order(self) -> None:
        try:
            self.checkpointer.close()
        finally:
            destroy(self._group)

    def _report_end(self, event: Committed | Failed) -> None:
        if not isinstance(event, Committed):
            return
        self._committed.append(event.target)
        report_committed(self._trainer, self, event)
        callback: Any = proxy(self._callback)
        for logger in self._trainer.loggers if self._trainer.is_global_zero else ():
            logger.after_save_checkpoint(callback)


class _TrainerRanks(Ranks):
    """All ranks of a trainer, which may be others where some are lost."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.move(0)

    def move(self, leader: int) -> None:
        """Be the ranks of the present default group."""
        world = dist.group.WORLD if self._trainer.world_size > 1 else None
        super().__init__(world, device=self._trainer.strategy.root_device)
        self.leader = leader


def _exists(path: str) -> bool:
    return bool(get_filesystem(path).exists(path))
