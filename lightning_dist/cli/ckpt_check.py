"""Reads checkpoints to the last byte, and shows how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from lightning_dist.checkpoint.disk.errors import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.storage import Storage, storage_of
from lightning_dist.checkpoint.disk.verify import Description, describe, verify
from lightning_dist.cli.errors import line_of


@dataclass(frozen=True)
class Verdict:
    """What came of reading a checkpoint. Exactly one of ``description`` and ``problem`` is set."""

    path: str
    description: Description | None
    problem: str = ""
    damaged: bool = False
    """The problem is in its bytes, and not that they could not be read or understood."""


Check = Callable[[str], Verdict]


def check(path: str, *, count: Callable[[int], None] = lambda nbytes: None) -> Verdict:
    """Read the checkpoint at ``path``.

    Args:
        count: called with the bytes that were read, again and again.
    """

    def find_storage(path: str) -> tuple[Storage, str]:
        storage, inside = storage_of(path)
        return cast(Storage, _Counting(storage, count)), inside

    try:
        return Verdict(path, verify(path, find_storage=find_storage))
    except (CheckpointError, OSError) as error:
        damaged = isinstance(error, CorruptCheckpointError)
        return Verdict(path, None, without_path(line_of(error), path), damaged)


@contextmanager
def checking(paths: Iterable[str] | None = None) -> Iterator[Check]:
    """:func:`check`, with a progress bar if stderr is a terminal.

    Args:
        paths: what will be read; None if nobody knows.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield check
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}", markup=False)
    with Progress(text, *columns, console=console, transient=True) as progress:
        total = None if paths is None else sum(map(_nbytes, paths))
        task = progress.add_task("", total=total)

        def run(path: str) -> Verdict:
            progress.update(task, description=path)
            return check(path, count=lambda nbytes: progress.advance(task, nbytes))

        yield run


def without_path(problem: str, path: str) -> str:
    """``problem`` for where the path is said already."""
    return problem.removeprefix(f"{path} ").removeprefix(f"{path}: ")


def _nbytes(path: str) -> int:
    try:
        return describe(path).nbytes
    except (CheckpointError, OSError):
        return 0


class _Counting:
    """A storage whose files say how much of them was read."""

    def __init__(self, storage: Storage, count: Callable[[int], None]) -> None:
        self._storage, self._count = storage, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def open(self, path: str) -> Any:
        return _CountingFile(self._storage.open(path), self._count)


class _CountingFile:
    def __init__(self, file: Any, count: Callable[[int], None]) -> None:
        self._file, self._count = file, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _CountingFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def read(self, nbytes: int = -1) -> bytes:
        data = bytes(self._file.read(nbytes))
        self._count(len(data))
        return data
