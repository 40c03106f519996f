"""``AsyncCheckpoint``: Lightning's ModelCheckpoint, asynchronous and safe."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_dist.checkpoint.checkpointer import Metrics
from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.integrations.checkpoint_choice import ResumeCheckpointIO, newest_checkpoint
from lightning_dist.integrations.checkpoint_session import CheckpointSession, folder_of
from lightning_dist.integrations.checkpoint_strategies import (
    require_supported,
    weights_may_change,
)
from lightning_dist.integrations.refusals import refuse_pytorch_lightning


class AsyncCheckpoint(ModelCheckpoint):
    """A ``ModelCheckpoint`` that training does not wait for, and that never loses a checkpoint.

    Takes everything that ``ModelCheckpoint`` takes, keeps the same files, names and state, and
    stands in for it anywhere. What differs: a file appears when it is complete and durable; what it
    replaces is removed after that; loggers hear of it then; ``save_last=True`` links the file of
    the same step instead of writing it again; ``ckpt_path="last"`` finds the newest whole
    checkpoint of the folder, verified, whatever its name.

    Args:
        *args: as of ``ModelCheckpoint``.
        snapshot: ``"overlap"``: parameters and optimizer state are copied during the next forward
            and backward pass, and the next optimizer step waits for the rest of the copy; all else
            is copied at once. ``"blocking"``: everything is copied at once. ``"sync"``: training
            waits for the disk too. ``"auto"``: overlap.
        max_in_flight: saves that may be under way; each has a copy of the state in host memory.
        on_busy: what a save does when so many are: ``"wait"``, or ``"skip"`` it and say so.
        writer: ``"process"``, which finishes its work when the trainer is killed; ``"thread"``;
            ``"auto"``: process, where others can see the files.
        format: ``"single"``: one file that ``torch.load`` and plain Lightning read, written by rank
            0. ``"sharded"``: a folder to which every rank writes an equal part; any number of ranks
            loads it, and ``lightning-dist ckpt consolidate`` makes one file of it.
        verify: ``"resume"``: what training goes on from is compared with its checksums first.
            ``"always"``: also everything written, before what it replaces is removed. ``"never"``.
        on_error: when a checkpoint could not be written, ``"raise"`` within one step, or
            ``"warn"`` and keep the earlier ones.
        host_memory_limit: bytes that the copies may take on a rank.
        **kwargs: as of ``ModelCheckpoint``.

    Raises:
        ValueError: a setting that is out of range or cannot take effect.
    """

    def __init__(
        self,
        *args: Any,
        snapshot: Literal["auto", "overlap", "blocking", "sync"] = "auto",
        max_in_flight: int = 1,
        on_busy: Literal["wait", "skip"] = "wait",
        writer: Literal["auto", "process", "thread"] = "auto",
        format: Literal["single", "sharded"] = "single",
        verify: Literal["resume", "always", "never"] = "resume",
        on_error: Literal["raise", "warn"] = "raise",
        host_memory_limit: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if format not in ("single", "sharded"):
            raise ValueError(f"format is one of 'single', 'sharded'; got {format!r}")
        self.settings = CheckpointSettings(
            snapshot=snapshot,
            max_in_flight=max_in_flight,
            on_busy=on_busy,
            writer=writer,
            verify=verify,
            on_error=on_error,
            host_memory_limit=host_memory_limit,
        )
        self.format = format
        self._session: CheckpointSession | None = None
        self._group: dist.ProcessGroup | None = None
        self._metrics = Metrics()
        self._last_committed: Committed | None = None
        self._removals: list[str] = []  # of this trigger
        self._doomed: set[str] = set()  # files that stay for now, but not for a user
        self._next_last: str | None = None  # what a link of the file being saved will be called
        self._skipped_step: int | None = None

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
        """What checkpoints have cost this rank."""
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
        require_supported(trainer.strategy)
        super().setup(trainer, pl_module, stage)
        if not isinstance(trainer.strategy.checkpoint_io, ResumeCheckpointIO):
            trainer.strategy.checkpoint_io = ResumeCheckpointIO(
                verify=self.settings.verify, trainer=trainer
            )
        if stage == "fit" and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            sharded = self.format == "sharded"
            if sharded and self._group is None and trainer.world_size > 1:
                self._group = dist.new_group(backend="gloo")
            self._session = CheckpointSession(
                self.settings, callback=self, trainer=trainer, sharded=sharded, group=self._group
            )
            self._session.open(folder_of(self, trainer))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._session is not None:
            self._session.watch_optimizers()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._session is not None:
            self._session.deliver()
        super().on_train_batch_end(trainer, *args, **kwargs)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is not None:
            super().on_train_end(trainer, pl_module)
            self._flush_removals()
            self._session.drain()
            self._session.agree_on_failures()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if trainer.world_size == 1 or isinstance(exception, SIGTERMException):
            super().on_exception(trainer, pl_module, exception)
        elif self._should_save_on_exception(trainer):
            # Saving takes all ranks, and the others may be waiting in a collective of the step.
            rank_zero_warn(
                f"with {trainer.world_size} ranks save_on_exception saves only what all of them "
                f"stop for (SIGTERM), not a {type(exception).__name__} that one may have had"
            )
        self._close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._close()

    def _close(self) -> None:
        if self._session is not None:
            self._flush_removals()
            session, self._session = self._session, None
            self._metrics, self._last_committed = session.metrics, session.last_committed
            session.close()

    @override
    def _save_topk_checkpoint(
        self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        assert self._session is not None
        self._session.agree_on_failures()
        if self._session.must_skip():
            self._skipped_step = trainer.global_step
            return
        if self.save_last is True:
            self._next_last = self._last_path(trainer, monitor_candidates)
        try:
            super()._save_topk_checkpoint(trainer, monitor_candidates)
        finally:
            self._next_last = None

    @override
    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        assert self._session is not None
        self._doomed.discard(filepath)
        at_once = weights_may_change(trainer)
        self._session.save(filepath, weights_only=self.save_weights_only, at_once=at_once)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath

    @override
    def _save_last_checkpoint(
        self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        if self._skipped_step != trainer.global_step:
            saved_now = self._last_global_step_saved == trainer.global_step
            if self.save_last is True and saved_now and self._last_checkpoint_saved:
                self._link_last(trainer, self._last_path(trainer, monitor_candidates))
            else:
                super()._save_last_checkpoint(trainer, monitor_candidates)
        self._flush_removals()

    def _link_last(self, trainer: pl.Trainer, path: str) -> None:
        assert self._session is not None
        previous, self.last_model_path = self.last_model_path, path
        self._doomed.discard(path)
        self._session.link(self._last_checkpoint_saved, path)
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

    @override
    def _link_checkpoint(  # type: ignore[override]  # a static method there
        self, trainer: pl.Trainer, filepath: str, linkpath: str
    ) -> None:
        assert self._session is not None
        self._session.link(filepath, linkpath, symbolic=True)

    @override
    def _remove_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        # Not before this trigger's link is made: `last` may still be what is removed.
        self._removals.append(filepath)
        self._doomed.add(filepath)

    def _flush_removals(self) -> None:
        removals, self._removals = self._removals, []
        for path in removals:
            assert self._session is not None
            self._session.remove(path)

    @override
    def file_exists(self, filepath: Any, trainer: pl.Trainer) -> bool:
        pending = self._session is not None and self._session.is_pending(filepath)
        there = filepath not in self._doomed and self._fs.exists(filepath)
        decision = trainer.is_global_zero and (pending or there)
        return trainer.strategy.reduce_boolean_decision(decision, all=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        # This is within the file that is being saved, which will be called `last` too.
        state = super().state_dict()
        return state if self._next_last is None else {**state, "last_model_path": self._next_last}

    @override
    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        others = super()._find_last_checkpoints(trainer)
        newest = newest_checkpoint(folder_of(self, trainer), others)
        return set() if newest is None else {newest}
