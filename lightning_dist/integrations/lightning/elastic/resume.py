"""Where a fit goes on: the checkpoint to load, and what Lightning's loops count after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.elastic.plan import Position
from lightning_dist.integrations.lightning import private
from lightning_dist.integrations.lightning.elastic.signals import NoticeConnector
from lightning_dist.integrations.lightning.elastic.sources import restore_sources


class RestartConnector(private.CheckpointConnector):
    """Loads the checkpoint that a restart goes on from, whatever the script asked for.

    Args:
        usual: the trainer's own, which this stands in for.
        path: of the checkpoint; None for what the script asked for.
        weights_only: how it is read, unless the script said so in ``fit``.
        on_loaded: given the checkpoint before anything of it is restored, empty if there is none;
            and how it is read.
        on_loops: called when the loops have their state from the checkpoint.
    """

    def __init__(
        self,
        usual: private.CheckpointConnector,
        *,
        path: str | None,
        weights_only: bool,
        on_loaded: Callable[[dict[str, Any], bool], None],
        on_loops: Callable[[], None],
    ) -> None:
        super().__init__(usual.trainer)
        self.__dict__.update(usual.__dict__)
        self.usual = usual
        self._path = path
        self._weights_only = weights_only
        self._on_loaded = on_loaded
        self._on_loops = on_loops

    @override
    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING:  # after a fit that failed
            super().resume_start(checkpoint_path, weights_only=weights_only)
            return
        if self._path and checkpoint_path and str(checkpoint_path) != self._path:
            rank_zero_info(
                f"elastic: goes on from the newest checkpoint of this run, so ckpt_path="
                f"{str(checkpoint_path)!r} is not loaded"
            )
        policy = self._weights_only if weights_only is None else weights_only
        super().resume_start(self._path or checkpoint_path, weights_only=policy)
        self._on_loaded(self._loaded_checkpoint, policy)

    @override
    def restore_loops(self) -> None:
        super().restore_loops()
        if self._loaded_checkpoint and self.trainer.state.fn == TrainerFn.FITTING:
            self._on_loops()


def restore_usual(trainer: pl.Trainer) -> None:
    """Give the trainer back what ElasticRestart has stood in for."""
    connector, signals = private.checkpoint_connector(trainer), private.signal_connector(trainer)
    if isinstance(connector, RestartConnector):
        private.set_checkpoint_connector(trainer, connector.usual)
    if isinstance(signals, NoticeConnector):
        private.give_back_handlers(signals, signals.usual)
        private.set_signal_connector(trainer, signals.usual)
    restore_sources(trainer)


def place_at_epoch_begin(trainer: pl.Trainer, epoch: int, *, steps: int, passes: int) -> None:
    """Let the fit loop begin ``epoch`` as if it had just ended the one before.

    Args:
        steps: optimizer steps so far.
        passes: batches of this rank so far.
    """
    loop = trainer.fit_loop
    _set_all(loop.epoch_progress, epoch)
    batches = loop.epoch_loop.batch_progress
    _set_all(batches, 0)
    _set(batches.total, passes)
    batches.is_last_batch = False
    private.set_steps(trainer, steps)
    loop.epoch_loop.automatic_optimization.optim_progress.reset_on_run()
    loop.epoch_loop.scheduler_progress.reset_on_run()
    for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        private.begin_with_fresh_loader(each)


def place_within_epoch(
    trainer: pl.Trainer,
    position: Position,
    *,
    steps: int,
    passes: int,
    total_passes: int,
    validated: bool,
) -> bool:
    """Let the fit loop go on within an epoch, and make up for a validation that was cut short.

    Returns whether it begins with that validation.

    Args:
        steps: optimizer steps so far.
        passes: batches of this rank in this epoch so far, if all of it had had this layout.
        total_passes: the same, of all epochs.
        validated: whether a validation that is due at this position is over.
    """
    loop = trainer.fit_loop
    progress: Any = loop.epoch_progress
    _set_all(progress, position.epoch)
    for each in (progress.total, progress.current):
        each.ready = each.started = position.epoch + 1
    batches = loop.epoch_loop.batch_progress
    _set(batches.current, passes)
    _set(batches.total, total_passes)
    batches.is_last_batch = passes >= loop.max_batches
    validation: Any = loop.epoch_loop.val_loop.batch_progress
    _set(validation.current, 0)
    done = validation.total.completed
    _set(validation.total, done)
    if not validated:  # "in the middle of it": Lightning then runs it, from its first batch
        validation.total.ready = validation.total.started = done + 1
    due = private.is_validation_due(trainer)
    # Where a validation is due the loop passes the end of that batch again, which counts it.
    private.set_steps(trainer, steps - due)
    return due and not validated


def _set_all(progress: Any, count: int) -> None:
    _set(progress.total, count)
    _set(progress.current, count)


def _set(tracker: Any, count: int) -> None:
    tracker.ready = tracker.started = tracker.processed = tracker.completed = count
