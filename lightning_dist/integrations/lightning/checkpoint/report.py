"""Reports about checkpoints: log lines, metrics, and a progress bar for long waits."""

from __future__ import annotations

import time
from pathlib import PurePath
from typing import Any

from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.jobs import Committed

_PATIENCE = 1.0
"""Seconds without a bar."""
_REFRESH = 0.1


def line(event: Committed, *, blocking_s: float) -> str:
    """One line for a checkpoint that is durable."""
    return (
        f"checkpoint {PurePath(event.target).name} of step {event.origin.step} is complete: "
        f"{decimal(event.total)} in {event.seconds:.2f} s; training was blocked for "
        f"{blocking_s * 1e3:.1f} ms"
    )


def drain(checkpointer: Checkpointer, *, show: bool, timeout: float | None = None) -> None:
    """Wait for everything under way; with a bar if it takes long.

    Args:
        show: whether this rank talks to the user.

    Raises:
        TimeoutError: after ``timeout`` seconds.
    """
    if not show:
        return checkpointer.wait(timeout)
    patience = _PATIENCE if timeout is None else min(_PATIENCE, timeout)
    try:
        checkpointer.wait(patience)
    except TimeoutError:
        _drain_with_bar(checkpointer, None if timeout is None else timeout - patience)


def _drain_with_bar(checkpointer: Checkpointer, timeout: float | None) -> None:
    deadline = None if timeout is None else time.monotonic() + timeout
    columns: list[Any] = [
        TextColumn("writing checkpoints"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    ]
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("")
        while True:
            written, total = checkpointer.progress()
            bar.update(task, completed=written, total=total)
            try:
                return checkpointer.wait(_REFRESH)
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
