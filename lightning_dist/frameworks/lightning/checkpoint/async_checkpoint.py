"""``AsyncCheckpoint``: Lightning's ModelCheckpoint, asynchronous and crash-safe."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from lightning_dist.checkpoint.checkpointer import Metrics
from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.checkpoint import private
from lightning_dist.frameworks.lightning.checkpoint.checkpoint_session import CheckpointSession
from lightning_dist.frameworks.lightning.checkpoint.private import checkpoint_folder
from lightning_dist.frameworks.lightning.checkpoint.resume import (
    LastCheckpoint,
    list_in,
    resume_io,
)
from lightning_dist.frameworks.lightning.checkpoint.trainer_saves import (
    require_effective,
    require_supported,
    weights_may_change,
)
from lightning_dist.settings.run import CheckpointSettings
from lightning_dist.settings.signatures import refuse_unknown, shows_arguments_of, takes
from lightning_dist.sync.arguments import refuse_pytorch_lightning

_PATIENCE = 120.0
"""Seconds that a failed training waits for its checkpoints."""


class AsyncCheckpoint(ModelCheckpoint):
    """``ModelCheckpoint`` that writes in the background and never removes a checkpoint too early.

    It takes the arguments of ``ModelCheckpoint``, keeps the same files, names and state, and can
    replace it anywhere. Differences: a file appears when it is complete and durable; the file that
    it replaces is removed and loggers are called after that; ``save_last=True`` links the file of
    the same step instead of writing it again; ``ckpt_path="last"`` finds the newest complete
    checkpoint of the folder, verified, whatever its name.
    """

    @shows_arguments_of(ModelCheckpoint)
    @takes(CheckpointSettings, "saving")
    def __init__(self, *args: Any, saving: CheckpointSettings, **kwargs: Any) -> None:
        """Check the arguments.

        Args:
            *args: as of ``ModelCheckpoint``.
            saving: each an argument of the callback.
            **kwargs: as of ``ModelCheckpoint``.

        Raises:
            ValueError: a setting that is out of range or cannot take effect.
        """
        refuse_unknown(kwargs, of=type(self))
        super().__init__(*args, **kwargs)
        self.settings, self.format = saving, saving.format
        self._metrics = Metrics()
        self._last_committed: Committed | None = None
        self._session: CheckpointSession | None = None
        self._next_last: str | None = None  # what a link of the file being saved will be called
        self._skipped_step: int | None = None
        self._last = LastCheckpoint(check=saving.verify != "never", lock=saving.lock)
        self._patience = _PATIENCE

    @property
    @override
    def state_key(self) -> str:
        return super().state_key.replace(type(self).__qualname__, "ModelCheckpoint", 1)

    @property
    def last_committed(self) -> Committed | None:
        """The newest checkpoint of this run that is durable; on a rank that writes."""
        return self._last_committed if self._session is None else self._session.last_committed

    @property
    def metrics(self) -> Metrics:
        """Cost of checkpoints on this rank."""
        return self._metrics if self._session is None else self._session.metrics

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves so far are durable, or have failed.

        Raises:
            TimeoutError: after ``timeout`` seconds.
        """
        if self._session is not None:
            self._session.wait(timeout)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        refuse_pytorch_lightning(trainer=trainer)
        require_supported(trainer.strategy, sharded=self.settings.sharded)
        require_effective(self.settings, trainer)
        self._require_alike(trainer)
        super().setup(trainer, pl_module, stage)
        self._last.agree(trainer)
        io = resume_io(trainer, verify=self.settings.verify)
        if self._last not in io.searches:
            io.searches.append(self._last)
        if stage == "fit" and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            session = CheckpointSession(
                self.settings, callback=self, trainer=trainer, sharded=self.settings.sharded
            )
            if not getattr(trainer.strategy, "joins", False):
                session.begin(checkpoint_folder(self, trainer))
            self._session = session
            self._last.release()  # the session keeps the folder

    def move(self, leader: int) -> None:
        """Go on with the present ranks, of which ``leader`` writes."""
        if self._session is not None:
            self._session.follow(leader)

    def _require_alike(self, trainer: pl.Trainer) -> None:
        settings = [self.settings, *(callback.settings for callback in callbacks_of(trainer))]
        if len(verify := {setting.verify for setting in settings}) > 1:
            raise ValueError(
                "A trainer loads one checkpoint for all of its callbacks, so each AsyncCheckpoint "
                f"needs the same verify=; got {', '.join(map(repr, sorted(verify)))}"
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._session is not None:
            self._session.watch(trainer.strategy.optimizers)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._session is not None:
            self._session.deliver()
        super().on_train_batch_end(trainer, *args, **kwargs)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is not None:
            super().on_train_end(trainer, pl_module)
            self._session.flush_removals()
            self._session.drain()
            self._session.agree_on_failures()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        deadline = time.monotonic() + self._patience
        try:
            if not self._should_save_on_exception(trainer):
                return
            if trainer.world_size > 1 and not isinstance(exception, SIGTERMException):
                # Saving takes all ranks, and others may be waiting in a collective of the step.
                rank_zero.warn(
                    f"With {trainer.world_size} ranks save_on_exception saves on SIGTERM only, not "
                    f"after a {type(exception).__name__}, which one rank alone may have raised"
                )
            elif self._is_idle_by(deadline, trainer):
                super().on_exception(trainer, pl_module, exception)
        finally:
            self._last.forget()
            self._close(max(deadline - time.monotonic(), 1.0))

    def _is_idle_by(self, deadline: float, trainer: pl.Trainer) -> bool:
        """Whether a save could be taken without waiting for another one; on all ranks."""
        idle = True
        try:
            self.wait(max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            idle = False
        return bool(trainer.strategy.reduce_boolean_decision(idle, all=True))

    @override
    def _should_save_on_exception(self, trainer: pl.Trainer) -> bool:
        return self._session is not None and super()._should_save_on_exception(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._last.forget()
        self._close()

    def _close(self, timeout: float | None = None) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            session.flush_removals()
            try:
                session.close(timeout)
            finally:
                self._metrics = session.metrics
                self._last_committed = session.last_committed

    @override
    def _save_topk_checkpoint(
        self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        if self._session is None:  # outside of a fit
            return super()._save_topk_checkpoint(trainer, monitor_candidates)
        if not self._session.may_begin():
            self._skipped_step = trainer.global_step
            return
        if self.save_last is True:
            self._next_last = self._last_path(trainer, monitor_candidates)
        try:
            super()._save_topk_checkpoint(trainer, monitor_candidates)
        finally:
            self._next_last = None

    @override
    def _update_best_and_save(
        self, current: Tensor, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        before = dict(self.best_k_models)
        super()._update_best_and_save(current, trainer, monitor_candidates)
        if self._session is not None:
            saved = self._last_checkpoint_saved
            self._session.displaced.note(saved, before=before, after=self.best_k_models)

    @override
    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        if self._session is None:  # outside of a fit
            return super()._save_checkpoint(trainer, filepath)
        self._claim(trainer, filepath)
        at_once = weights_may_change(trainer)
        self._session.save(filepath, weights_only=self.save_weights_only, at_once=at_once)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath

    @override
    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        folder, usual = checkpoint_folder(self, trainer), super()._find_last_checkpoints
        found = self._last.find(
            trainer,
            folder,
            lambda: list_in(folder, usual(trainer)),
            suffix=self.FILE_EXTENSION,
        )
        return set() if found is None else {found}

    # Files appear and disappear later than ModelCheckpoint asks for, and other callbacks may share
    # the folder. A file that is being written has its name already, and so has one that another
    # callback is about to remove; a file that this one is about to remove has not.

    @override
    def _save_last_checkpoint(
        self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        if self._session is None:  # outside of a fit
            return super()._save_last_checkpoint(trainer, monitor_candidates)
        if self._skipped_step != trainer.global_step:
            saved_now = self._last_global_step_saved == trainer.global_step
            if self.save_last is True and saved_now and self._last_checkpoint_saved:
                self._link_last(trainer, self._last_path(trainer, monitor_candidates))
            else:
                super()._save_last_checkpoint(trainer, monitor_candidates)
        self._session.flush_removals()

    def _link_last(self, trainer: pl.Trainer, path: str) -> None:
        assert self._session is not None
        previous, self.last_model_path = self.last_model_path, path
        self._claim(trainer, path)
        self._session.link(self._last_checkpoint_saved, path)
        self._last_checkpoint_saved = path
        if previous and self._should_remove_checkpoint(trainer, previous, path):
            self._remove_checkpoint(trainer, previous)

    def _last_path(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> str:
        name = self.CHECKPOINT_NAME_LAST
        path, version = self.format_checkpoint_name(monitor_candidates, name), self.STARTING_VERSION
        while (
            self._enable_version_counter
            and self.file_exists(path, trainer)
            and path != self.last_model_path
        ):
            path = self.format_checkpoint_name(monitor_candidates, name, ver=version)
            version += 1
        return path

    @staticmethod
    @override
    def _link_checkpoint(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        # Static, as in Lightning, whose versions call it on the object or on the class.
        known = callbacks_of(trainer) if isinstance(trainer, pl.Trainer) else []
        saved = (
            c for c in known if (private.newest_saved(c), c.last_model_path) == (filepath, linkpath)
        )
        callback = next(saved, None)
        if callback is None or callback._session is None:
            private.link_checkpoint(trainer, filepath, linkpath)
        else:
            callback._claim(trainer, linkpath)
            callback._session.link(filepath, linkpath, symbolic=True)

    @override
    def _remove_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        assert self._session is not None
        self._session.remove(filepath)

    def _claim(self, trainer: pl.Trainer, path: str) -> None:
        """Write to ``path`` next; others that share the folder must not remove it after that."""
        for callback in callbacks_of(trainer):
            session = callback._session
            if session is not None and session.is_pending_deletion(path):
                session.keep(path)
                if callback is not self:
                    session.wait()

    @override
    def file_exists(self, filepath: Any, trainer: pl.Trainer) -> bool:
        sessions = [c._session for c in callbacks_of(trainer) if c._session is not None]
        pending = any(session.is_pending(filepath) for session in sessions)
        going = self._session is not None and self._session.is_pending_deletion(filepath)
        decision = trainer.is_global_zero and (pending or (not going and self._fs.exists(filepath)))
        return trainer.strategy.reduce_boolean_decision(decision, all=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        # This is within the file that is being saved, which will be called `last` too.
        state = super().state_dict()
        return state if self._next_last is None else {**state, "last_model_path": self._next_last}


def callbacks_of(trainer: pl.Trainer) -> list[AsyncCheckpoint]:
    """All callbacks of ``trainer`` that save asynchronously."""
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, AsyncCheckpoint)]
