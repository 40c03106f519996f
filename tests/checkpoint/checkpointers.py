"""Checkpointers that are open for a test, writers that do nothing, and copies that a test holds."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from worlds import Rank

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.snapshot.snapshot import LaterCopy
from lightning_dist.checkpoint.writers import WriterProcess
from lightning_dist.settings.run import CheckpointSettings

LIMIT = 30.0


@contextmanager
def opened(folder: object, **settings: Any) -> Iterator[Checkpointer]:
    checkpointer = Checkpointer(CheckpointSettings(**settings))
    checkpointer.open(str(folder))
    try:
        yield checkpointer
    finally:
        checkpointer.close(LIMIT)


@contextmanager
def opened_together(folder: object, rank: Rank, **settings: Any) -> Iterator[Checkpointer]:
    """On all ranks of a world of threads, rank 0 first."""
    group = rank.group("checkpoint")
    checkpointer = Checkpointer(CheckpointSettings(**settings), group=group)
    if rank.rank == 0:
        checkpointer.open(str(folder))
    rank.barrier.wait()
    if rank.rank > 0:
        checkpointer.open(str(folder))
    yield checkpointer
    checkpointer.close(LIMIT)


def writer_of(checkpointer: Checkpointer) -> WriterProcess:
    writer = checkpointer._queue.writer
    assert isinstance(writer, WriterProcess)
    return writer


@contextmanager
def stopped_writer(checkpointer: Checkpointer) -> Iterator[WriterProcess]:
    """Its writer does nothing in the meantime."""
    writer = writer_of(checkpointer)
    os.kill(writer.pid, signal.SIGSTOP)
    try:
        yield writer
    finally:
        os.kill(writer.pid, signal.SIGCONT)


@dataclass
class HeldCopies:
    """The copy has begun at ``begun``, and goes on when ``go`` is set."""

    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


@contextmanager
def held_copies(patch: pytest.MonkeyPatch, *, after: bool = False) -> Iterator[HeldCopies]:
    """Hold every :class:`LaterCopy` before it copies, or ``after``, before it looks for tears."""
    held = HeldCopies()

    def wait() -> None:
        held.begun.set()
        assert held.go.wait(LIMIT), "nobody let the copy go on"

    def method(original: Any) -> Any:
        def waiting(self: LaterCopy) -> Any:
            wait()
            return original(self)

        return waiting

    name = "_torn" if after else "run"
    with patch.context() as context:
        context.setattr(LaterCopy, name, method(getattr(LaterCopy, name)))
        try:
            yield held
        finally:
            held.go.set()
