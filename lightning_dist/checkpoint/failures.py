"""Checkpoints that were not written: which end a training, and what a user is told."""

from __future__ import annotations

from lightning_dist.checkpoint.disk.jobs import Committed, Failed


def is_fatal(event: Failed) -> bool:
    """Whether a checkpoint is missing that the disk did not take."""
    return event.origin is not None and not event.dropped


def failure(event: Failed, last: Committed | None) -> str:
    """Message about a checkpoint that was not written.

    Args:
        last: the newest one of this start that was.
    """
    of_step = "" if event.origin is None else f" of step {event.origin.step}"
    kept = (
        f"the last complete one is {last.target} of step {last.origin.step}"
        if last is not None
        else "none of this run is complete yet"
    )
    return f"The checkpoint {event.target}{of_step} was not written: {event.reason}; {kept}"
