"""Folders in memory that accelerate writes its files to, until they are in the checkpoint."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

import psutil

_MEMORY = "/dev/shm"
_PREFIX = "lightning_dist-state-"
_MARK = "handed_over"
_MARGIN = 64 << 20
_FRESH_S = 60.0
_ABANDONED_S = 24 * 3600.0


class Scratch:
    """A folder that lives until :meth:`remove`, or as long as somebody needs it.

    While its process lives it is locked. Once handed over it belongs to the writer, which removes
    it even where the process has been killed. What neither could remove, :func:`sweep` does.
    """

    def __init__(self, base: str) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.files = os.path.join(self.path, "files")
        os.mkdir(self.files)

    def hand_over(self, folder: str) -> None:
        """From now on a writer reads the files, which puts them in ``folder``."""
        Path(self.path, _MARK).write_text(folder)

    def remove(self) -> None:
        """Remove it, if nobody has."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def base_for(nbytes: int, given: str | None) -> str:
    """Parent for a folder of about ``nbytes``: in memory if there is room, else on disk."""
    if given is not None:
        return given
    room = 0
    if os.access(_MEMORY, os.W_OK | os.X_OK):
        room = min(shutil.disk_usage(_MEMORY).free, psutil.virtual_memory().available)
    return _MEMORY if nbytes + nbytes // 10 + _MARGIN <= room else tempfile.gettempdir()


def sweep(given: str | None, *, released: str = "") -> None:
    """Remove what killed processes of this user have left.

    Args:
        given: where; None: wherever :func:`base_for` puts scratch folders.
        released: a folder to which no writer of a dead process writes any more.
    """
    bases = [_MEMORY, tempfile.gettempdir()] if given is None else [given]
    for path in chain.from_iterable(Path(base).glob(f"{_PREFIX}*") for base in bases):
        with suppress(OSError):
            state, mark = path.stat(), path / _MARK
            limit = _FRESH_S  # somebody might be making it
            if mark.exists():
                limit = -1.0 if mark.read_text() == released else _ABANDONED_S
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > limit:
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
