"""Checkpointers that are open for a test, on one rank or on all, and writers that do nothing."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from worlds import Rank

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.checkpoint.writers import WriterProcess

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
    writer = checkpointer._delivery.writer
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
