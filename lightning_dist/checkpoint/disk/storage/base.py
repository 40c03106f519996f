"""Interface of a storage for checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SLICE = 8 << 20
"""Bytes per read and write: large enough to be quick, small enough to start writing back early."""

Bytes = bytes | memoryview


class Sink(Protocol):
    """A file that is being written from its first byte to its last."""

    def write(self, data: Bytes) -> None: ...

    def close(self) -> None:
        """Make what was written durable, as far as the store can say so."""

    def abort(self) -> None:
        """Give up; what was written need not be there."""


class Storage(ABC):
    """One way of keeping files. Paths are absolute, or URLs; their folder need not exist."""

    @abstractmethod
    def staging(self, target: str, save_id: str) -> str:
        """The path to write ``target`` at until it is published."""

    @abstractmethod
    def create(self, path: str) -> Sink: ...

    @abstractmethod
    def make_folder(self, path: str) -> None: ...

    @abstractmethod
    def publish(self, staged: str, target: str) -> None:
        """Show what was staged under its name, in place of what had that name."""

    @abstractmethod
    def link(self, source: str, target: str, *, symbolic: bool = False) -> None:
        """Show ``source`` under a second name, in place of what had that name."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file or folder; all of it, or, if killed, none or what nobody sees."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """Names in a folder, sorted; empty if there is no such folder."""

    @abstractmethod
    def exists(self, path: str) -> bool: ...

    @abstractmethod
    def is_folder(self, path: str) -> bool: ...

    @abstractmethod
    def nbytes(self, path: str) -> int: ...

    @abstractmethod
    def modified_ns(self, path: str) -> int:
        """Nanoseconds since 1970."""

    @abstractmethod
    def open(self, path: str) -> Any:
        """A seekable binary file for reading."""

    def free_bytes(self, path: str) -> int | None:
        """Bytes that may still be written beside ``path``; None where nobody knows."""
        return None

    def leftovers(self, folder: str) -> list[str]:
        """Paths of staged and half-removed things that a dead process has left in a folder."""
        return []

    def tree_nbytes(self, path: str) -> int:
        """Bytes of a file, or of all files under a folder, for watching how they grow.

        What cannot be read counts nothing: others may rename or remove it meanwhile.
        """
        try:
            if self.is_folder(path):
                return sum(self.tree_nbytes(f"{path}/{name}") for name in self.names(path))
            return self.nbytes(path)
        except OSError:
            return 0

    def read(self, path: str) -> bytes:
        with self.open(path) as file:
            return bytes(file.read())

    def write(self, path: str, data: bytes) -> None:
        with self.creating(path) as sink:
            sink.write(data)

    @contextmanager
    def creating(self, path: str) -> Iterator[Sink]:
        """A sink that is closed after the body, and given up where that raises."""
        sink = self.create(path)
        try:
            yield sink
        except BaseException:
            sink.abort()
            raise
        sink.close()


def manifest_last(name: str) -> bool:
    """For sorting names so that what makes a folder a checkpoint is written last."""
    return name == "manifest.json"
