"""Disks that fail: at the n-th thing that is done to them, with a power cut, full, or slow."""

import errno
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dist.checkpoint.disk.storage import LocalStorage, Sink, Storage
from lightning_dist.checkpoint.disk.storage import local as storage
from tests.campaigns.checkpoint_crash.trainer import Gate

_OPERATIONS = ("open", "write", "fsync", "rename", "unlink", "rmdir", "mkdir", "link", "symlink")
_real = {name: getattr(os, name) for name in _OPERATIONS}

Perform = Callable[[], Any]
Fault = Callable[[int, str, Perform, tuple[Any, ...]], Any]
"""``fault(n, name, perform, arguments)`` performs the n-th operation, or does not."""


def no_fault(number: int, name: str, perform: Perform, arguments: tuple[Any, ...]) -> Any:
    return perform()


class Boundaries:
    """Counts the system calls by which this process changes the disk while ``armed``.

    The functions of ``os`` are replaced, so this is for a process that ends soon. ``exchange``:
    whether the file system can exchange two names (NFS cannot).
    """

    def __init__(self, fault: Fault, *, exchange: bool = True) -> None:
        self.armed = False
        self.count = 0
        self.names: list[str] = []
        self._fault = fault
        for name in _OPERATIONS:
            setattr(os, name, self._counted(name, _real[name]))
        if exchange:
            storage._exchange = self._counted("exchange", storage._exchange)
        else:
            storage.ctypes.CDLL = lambda *_, **__: None

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            reads = name == "open" and not arguments[1] & os.O_CREAT
            if not self.armed or reads:
                return call(*arguments, **options)
            if options.get("dir_fd") is not None:
                arguments = (f"/proc/self/fd/{options.pop('dir_fd')}/{arguments[0]}",)
            self.count += 1
            self.names.append(name)
            return self._fault(self.count, name, lambda: call(*arguments, **options), arguments)

        return operation


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill(at: int, *, after: bool) -> Fault:
    """SIGKILL before or after an operation."""

    def fault(number: int, name: str, perform: Perform, arguments: tuple[Any, ...]) -> Any:
        if number == at and not after:
            _die()
        result = perform()
        if number == at:
            _die()
        return result

    return fault


def fail(at: int, error: int, *, for_good: bool) -> Fault:
    """An operation fails; with ``for_good`` all that follow fail too."""

    def fault(number: int, name: str, perform: Perform, arguments: tuple[Any, ...]) -> Any:
        if number == at or (for_good and number > at):
            if name == "write" and error == errno.ENOSPC:
                _real["write"](arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
            raise OSError(error, os.strerror(error))
        return perform()

    return fault


def write_short(at: int) -> Fault:
    """From an operation on, writes take a part of what they are given."""

    def fault(number: int, name: str, perform: Perform, arguments: tuple[Any, ...]) -> Any:
        if name == "write" and number >= at:
            data = memoryview(arguments[1]).cast("B")
            return _real["write"](arguments[0], data[: max(1, data.nbytes // 3)])
        return perform()

    return fault


@dataclass
class PowerCut:
    """The power fails before an operation: what no fsync has made durable is lost.

    Contents of files that were not synced are gone. Names: with ``forget`` everything that was done
    in a folder since that folder was synced is undone, in reverse order; otherwise it is kept.
    ``attic`` is a folder on the same file system, for what may have to come back.
    """

    at: int
    forget: bool
    attic: str
    _files: dict[int, int] = field(default_factory=dict)
    """Unsynced files: a descriptor of ours by inode."""
    _journal: list[tuple[tuple[int, int], Perform]] = field(default_factory=list)
    _saved: int = 0

    def __call__(self, number: int, name: str, perform: Perform, arguments: tuple[Any, ...]) -> Any:
        if number == self.at:
            self._lose()
            _die()
        undo = self._undo(name, arguments)
        result = perform()
        if undo is not None:
            self._journal.append(undo)
        if name == "open":
            self._files[os.fstat(result).st_ino] = os.dup(result)
        elif name == "write":
            self._files.setdefault(os.fstat(arguments[0]).st_ino, os.dup(arguments[0]))
        elif name == "fsync":
            self._keep(arguments[0])
        return result

    def _keep(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            key = found.st_dev, found.st_ino
            self._journal = [entry for entry in self._journal if entry[0] != key]
        elif found.st_ino in self._files:
            os.close(self._files.pop(found.st_ino))

    def _lose(self) -> None:
        if self.forget:
            for _, undo in reversed(self._journal):
                undo()
        for descriptor in self._files.values():
            os.ftruncate(descriptor, 0)

    def _undo(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name in ("write", "fsync"):
            return None
        path = arguments[1] if name in ("rename", "link", "symlink", "exchange") else arguments[0]
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        found = os.fstat(folder)
        here = f"/proc/self/fd/{folder}/{os.path.basename(path)}"
        there = f"/proc/self/fd/{folder}/{os.path.basename(str(arguments[0]))}"
        undo = self._undo_at(name, here, there)
        return None if undo is None else ((found.st_dev, found.st_ino), undo)

    def _undo_at(self, name: str, here: str, there: str) -> Perform | None:
        if name == "exchange":
            aside = self._aside()
            return lambda: (
                _real["rename"](here, aside),
                _real["rename"](there, here),
                _real["rename"](aside, there),
            )
        saved = None
        if os.path.islink(here) or os.path.isfile(here):
            saved = self._aside()
            _real["link"](here, saved, follow_symlinks=False)
        if name == "unlink":
            return lambda: _real["rename"](saved, here)
        if name == "rmdir":
            return lambda: _real["mkdir"](here)
        if name == "mkdir":
            return None if os.path.isdir(here) else lambda: shutil.rmtree(here)
        if name == "rename":
            return lambda: (
                _real["rename"](here, there),
                _real["rename"](saved, here) if saved else None,
            )
        return None if saved else lambda: _real["unlink"](here)  # open, link, symlink

    def _aside(self) -> str:
        self._saved += 1
        return f"{self.attic}/{self._saved}"


class FaultyStorage(LocalStorage):
    """A storage for all paths."""

    def find(self, path: str) -> tuple[Storage, str]:
        return self, os.path.abspath(path)


class SlowStorage(FaultyStorage):
    """Every file but manifests and the like becomes durable when the next save is asked for."""

    def __init__(self) -> None:
        self.gate = Gate(slow=True)

    def create(self, path: str) -> Sink:
        sink = super().create(path)
        return sink if path.endswith(".json") else _SlowSink(sink, self.gate)


class _SlowSink:
    def __init__(self, sink: Sink, gate: Gate) -> None:
        self._sink, self._gate = sink, gate
        self.write, self.abort = sink.write, sink.abort

    def close(self) -> None:
        self._gate.pass_through()
        self._sink.close()


class UncountedStorage(FaultyStorage):
    """Nobody knows how full the disk is until a write fails."""

    def free_bytes(self, path: str) -> int | None:
        return None


@contextmanager
def small_disk(place: Path, *, nbytes: int) -> Iterator[Path]:
    """A file system of ``nbytes`` at ``place``; needs root."""
    place.mkdir()
    options = f"size={nbytes}"
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True, capture_output=True
    )
    try:
        yield place
    finally:
        # Lazily: a writer that was killed may not be gone yet.
        subprocess.run(["umount", "--lazy", place], check=True, capture_output=True)
        with suppress(OSError):
            place.rmdir()


def fill(path: Path, *, leave: int) -> None:
    """Write a file that leaves about ``leave`` bytes of its file system free."""
    state = os.statvfs(path.parent)
    nbytes = max(0, state.f_bavail * state.f_frsize - leave)
    with suppress(OSError), path.open("wb") as file:  # somebody else may be faster
        file.write(bytes(nbytes))
