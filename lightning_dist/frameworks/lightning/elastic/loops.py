"""Counters of Lightning's loops when training resumes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_dist.elastic.data.plan import Position
from lightning_dist.frameworks.lightning.elastic import private


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


def place_at_step(trainer: pl.Trainer, passes: int | None, *, before: int) -> None:
    """Let the epoch loop count as if all steps so far had been taken with the present layout.

    Args:
        passes: batches of this epoch; None between two epochs.
        before: batches of the epochs before.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    counts = [(progress.total, before + (passes or 0))]
    if passes is not None:
        counts.append((progress.current, passes))
    for each, count in counts:
        more = count - each.processed
        each.ready, each.started = each.ready + more, each.started + more
        each.processed, each.completed = each.processed + more, each.completed + more


def _set_all(progress: Any, count: int) -> None:
    _set(progress.total, count)
    _set(progress.current, count)


def _set(tracker: Any, count: int) -> None:
    tracker.ready = tracker.started = tracker.processed = tracker.completed = count
