"""Where checkpoints are kept: a local (or mounted) directory, or an object store behind fsspec.

Both promise the same: what is staged is not there for a reader until it is published, publishing
replaces what had that name, and nothing else can be seen by anybody, whatever is killed when.

========  =================================  ==================================================
          local                              object store
========  =================================  ==================================================
staged    ``.name.tmp-ID`` beside the name   at its final keys; shards carry the ID in theirs
durable   fsync of file and folder           when the upload is complete
publish   rename                             the single object appears when it is complete; of a
                                             folder the manifest is uploaded last
========  =================================  ==================================================
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, Protocol

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(tmp|trash)-[0-9a-f]{16}", re.DOTALL)
_SLICE = 8 << 20
"""Bytes per write: large enough to be quick, small enough to start writing back early."""

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

    def read(self, path: str) -> bytes:
        with self.open(path) as file:
            return bytes(file.read())

    def write(self, path: str, data: bytes) -> None:
        sink = self.create(path)
        try:
            sink.write(data)
        except BaseException:
            sink.abort()
            raise
        sink.close()


class _LocalSink:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._written = self._flushed = 0

    def write(self, data: Bytes) -> None:
        view = memoryview(data)
        while view.nbytes:  # a write may be short
            count = os.write(self._file, view[:_SLICE])
            view = view[count:]
            self._written += count
            if self._written - self._flushed >= _SLICE:
                self._start_writing_back()

    def _start_writing_back(self) -> None:
        # The kernel would begin at the fsync, when the disk has idled all the while.
        if hasattr(os, "posix_fadvise"):
            length = self._written - self._flushed
            os.posix_fadvise(self._file, self._flushed, length, os.POSIX_FADV_DONTNEED)
        self._flushed = self._written

    def close(self) -> None:
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def abort(self) -> None:
        os.close(self._file)


class LocalStorage(Storage):
    """A folder of this machine or one that is mounted on it."""

    def staging(self, target: str, save_id: str) -> str:
        folder, name = os.path.split(target)
        return os.path.join(folder, f".{name}.tmp-{save_id}")

    def create(self, path: str) -> Sink:
        return _LocalSink(path)

    def make_folder(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def publish(self, staged: str, target: str) -> None:
        if os.path.isdir(staged):
            for folder, _, _ in os.walk(staged):
                _sync_folder(folder)
        replaced = None
        if os.path.isdir(target) or (os.path.isdir(staged) and os.path.lexists(target)):
            replaced = _exchange(staged, target)
        else:
            os.rename(staged, target)
        _sync_folder(os.path.dirname(target))
        if replaced is not None:
            self.remove(replaced)

    def link(self, source: str, target: str, *, symbolic: bool = False) -> None:
        staged = self.staging(target, os.urandom(8).hex())
        try:
            if symbolic:
                os.symlink(os.path.relpath(source, os.path.dirname(target)), staged)
            elif os.path.isdir(source):
                os.mkdir(staged)
                for name in sorted(self.names(source), key=_manifest_last):
                    _hard_link(os.path.join(source, name), os.path.join(staged, name))
            else:
                _hard_link(source, staged)
            self.publish(staged, target)
        except OSError:
            self.remove(staged)
            raise

    def remove(self, path: str) -> None:
        if os.path.islink(path) or os.path.isfile(path):
            os.unlink(path)
        elif os.path.isdir(path):
            trash, leftover = path, _LEFTOVER.fullmatch(os.path.basename(path))
            if leftover is None or leftover[2] == "tmp":
                trash = _trash(path)
                os.rename(path, trash)  # nobody finds some of its files, or adds one meanwhile
            shutil.rmtree(trash)
        else:
            folder, name = os.path.split(path)
            for rest in self.leftovers(folder):  # of a removal that failed
                if os.path.basename(rest).startswith(f".{name}.trash-"):
                    shutil.rmtree(rest)

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):  # also if it was published just now
            return []

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def nbytes(self, path: str) -> int:
        return os.stat(path).st_size

    def modified_ns(self, path: str) -> int:
        return os.stat(path).st_mtime_ns

    def open(self, path: str) -> Any:
        return open(path, "rb")

    def free_bytes(self, path: str) -> int | None:
        state = os.statvfs(os.path.dirname(path))
        return state.f_bavail * state.f_frsize

    def leftovers(self, folder: str) -> list[str]:
        return [
            os.path.join(folder, name) for name in self.names(folder) if _LEFTOVER.fullmatch(name)
        ]


class ObjectStorage(Storage):
    """An fsspec filesystem whose files appear when they are complete, and cannot be renamed."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def staging(self, target: str, save_id: str) -> str:
        return target

    def create(self, path: str) -> Sink:
        return _ObjectSink(self._fs.open(path, "wb"))

    def make_folder(self, path: str) -> None:
        self._fs.makedirs(path, exist_ok=True)

    def publish(self, staged: str, target: str) -> None:
        pass

    def link(self, source: str, target: str, *, symbolic: bool = False) -> None:
        if not self._fs.isdir(source):
            self._fs.cp_file(source, target)
            return
        names = self.names(source)
        self.make_folder(target)
        for name in sorted(names, key=_manifest_last):
            self._fs.cp_file(f"{source}/{name}", f"{target}/{name}")

    def remove(self, path: str) -> None:
        if self._fs.isdir(path):
            for name in sorted(self.names(path), key=_manifest_last, reverse=True):
                self._fs.rm_file(f"{path}/{name}")
            self._fs.rm(path, recursive=True) if self._fs.exists(path) else None
        elif self._fs.exists(path):
            self._fs.rm_file(path)

    def names(self, path: str) -> list[str]:
        if not self._fs.isdir(path):
            return []
        self._fs.invalidate_cache(path)
        return sorted(PurePosixPath(found).name for found in self._fs.ls(path, detail=False))

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(path))

    def is_folder(self, path: str) -> bool:
        return bool(self._fs.isdir(path))

    def nbytes(self, path: str) -> int:
        return int(self._fs.size(path))

    def modified_ns(self, path: str) -> int:
        return int(self._fs.modified(path).timestamp() * 1e9)

    def open(self, path: str) -> Any:
        return self._fs.open(path, "rb")


class _ObjectSink:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Bytes) -> None:
        view = memoryview(data)
        for start in range(0, view.nbytes, _SLICE):
            self._file.write(view[start : start + _SLICE])

    def close(self) -> None:
        self._file.close()

    def abort(self) -> None:
        if hasattr(self._file, "discard"):
            self._file.discard()
        with suppress(AttributeError):
            self._file.closed = True  # fsspec would upload what there is when it is collected


def storage_of(path: str) -> tuple[Storage, str]:
    """The storage of a path or URL, and the path within it."""
    if "://" not in path:
        return LocalStorage(), os.path.abspath(os.path.expanduser(path))
    import fsspec  # not needed, and not there in the writer, for local paths

    filesystem, inside = fsspec.core.url_to_fs(path)
    if "file" in (filesystem.protocol, *filesystem.protocol):
        return LocalStorage(), os.path.abspath(inside)
    return ObjectStorage(filesystem), inside


def _manifest_last(name: str) -> bool:
    return name == "manifest.json"


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hard_link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV):
            raise
        shutil.copyfile(source, target)  # a filesystem without hard links
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def _trash(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.trash-{os.urandom(8).hex()}")


def _exchange(one: str, other: str) -> str:
    """Give ``one`` the name ``other``; returns where that one is now."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE: neither is missing in between
    if call is not None and call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return one
    aside = _trash(other)  # NFS and some others cannot; `recover` finds what is lost in between
    os.rename(other, aside)
    os.rename(one, other)
    return aside
