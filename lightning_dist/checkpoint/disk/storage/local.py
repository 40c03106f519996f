"""A folder of this machine, or one that is mounted on it."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
from contextlib import suppress
from typing import Any

from lightning_dist.checkpoint.disk.storage.base import SLICE, Bytes, Sink, Storage, manifest_last

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old|trash)-[0-9a-f]{16}", re.DOTALL)
"""Names of staged checkpoints, of those about to be replaced, and of those being removed."""
_LONGEST = 255 - len("..trash-") - 16
"""Bytes of a name that another one of these can have in it."""


class _LocalSink:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._written = self._flushed = 0

    def write(self, data: Bytes) -> None:
        view = memoryview(data)
        while view.nbytes:  # a write may be short
            count = os.write(self._file, view[:SLICE])
            view = view[count:]
            self._written += count
            if self._written - self._flushed >= SLICE:
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
        return os.path.join(folder, f".{_short(name)}.tmp-{save_id}")

    def create(self, path: str) -> Sink:
        return _LocalSink(path)

    def make_folder(self, path: str) -> None:
        missing, known = [], path
        while known and not os.path.isdir(known):
            missing.append(known)
            known = os.path.dirname(known)
        os.makedirs(path, exist_ok=True)
        for made in missing:  # a file is durable if its folder is
            _sync_folder(os.path.dirname(made) or ".")

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
                for name in sorted(self.names(source), key=manifest_last):
                    _hard_link(os.path.join(source, name), os.path.join(staged, name))
            else:
                _hard_link(source, staged)
            self.publish(staged, target)
        except OSError:
            self.remove(staged)
            raise

    def remove(self, path: str) -> None:
        if os.path.islink(path) or os.path.isfile(path):
            with suppress(FileNotFoundError):  # another rank has renamed or removed it just now
                os.unlink(path)
        elif os.path.isdir(path):
            trash, leftover = path, _LEFTOVER.fullmatch(os.path.basename(path))
            if leftover is None or leftover["kind"] != "trash":
                trash = _aside(path, "trash")
                os.rename(path, trash)  # nobody finds some of its files, or adds one meanwhile
            shutil.rmtree(trash)
        else:
            folder, name = os.path.split(path)
            for rest in self.leftovers(folder):  # of a removal that failed
                if os.path.basename(rest).startswith(f".{_short(name)}.trash-"):
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


def leftovers_by_name(storage: LocalStorage, folder: str) -> dict[str, dict[str, list[str]]]:
    """Paths of leftovers by the name that each was to have or has had, and by kind.

    A long name that nothing has now is known in its short form alone.
    """
    there = {_short(name): name for name in storage.names(folder)}
    found: dict[str, dict[str, list[str]]] = {}
    for path in storage.leftovers(folder):
        match = _LEFTOVER.fullmatch(os.path.basename(path))
        assert match is not None
        name = there.get(match["name"], match["name"])
        kinds = found.setdefault(name, {"tmp": [], "old": [], "trash": []})
        kinds[match["kind"]].append(path)
    return found


def cut_off(storage: LocalStorage, folder: str) -> list[str]:
    """Checkpoints without a name: replacements that were cut between their two renames.

    The staged ones, and those that had the name.
    """
    return [
        path
        for name, left in leftovers_by_name(storage, folder).items()
        if left["old"] and not os.path.lexists(os.path.join(folder, name))
        for path in (*left["tmp"], *left["old"])
    ]


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


def _aside(path: str, kind: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{_short(name)}.{kind}-{os.urandom(8).hex()}")


def _short(name: str) -> str:
    """``name``, or its begin and a digest if it is so long that nothing can be added to it."""
    encoded = os.fsencode(name)
    if len(encoded) <= _LONGEST:
        return name
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    begin = encoded[: _LONGEST - 1 - len(digest)].decode(errors="ignore")
    return f"{begin}~{digest}"


def _exchange(one: str, other: str) -> str:
    """Give ``one`` the name ``other``; returns where that one is now."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE: neither is missing in between
    if call is not None and call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return one
    aside = _aside(other, "old")  # NFS cannot; `cut_off` finds what is lost in between
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    trash = _aside(other, "trash")  # replaced: if it cannot be removed now, the next start does
    try:
        os.rename(aside, trash)
    except OSError:
        return aside
    return trash
