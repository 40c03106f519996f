"""What a folder of checkpoints holds beside them, and who writes to it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import sys
from dataclasses import dataclass

from lightning_dist.checkpoint.disk.archive import ROOT
from lightning_dist.checkpoint.disk.folder_owner import LOCK
from lightning_dist.checkpoint.disk.manifest import FORMAT, NAME, RECORD
from lightning_dist.checkpoint.disk.scan import SUFFIX, checkpoints
from lightning_dist.checkpoint.disk.storage import LocalStorage, Storage, storage_of

_SHARD = re.compile(r"shard-\d{5}-of-\d{5}-[0-9a-f]{16}\.bin")
_FIRST_RECORD = f"{ROOT}/{RECORD}".encode()
_FLOCK = "hhqqi"
"""``struct flock`` of Linux: type, whence, start, length, process."""


@dataclass(frozen=True)
class Owner:
    """The trainer that writes to a folder, or the writer that has survived it."""

    host: str
    pid: int
    ended: bool
    """The trainer has ended; its writer has something to finish."""

    def __str__(self) -> str:
        process = f"process {self.pid} on {self.host}"
        return f"the writer of {process}, which has ended" if self.ended else process


def require_folder(folder: str) -> tuple[Storage, str]:
    """The storage of a folder of checkpoints, and the path within it.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is something else.
    """
    storage, inside = storage_of(folder)
    if not storage.exists(inside):
        raise FileNotFoundError(f"there is no folder {folder}")
    if not storage.is_folder(inside):
        raise ValueError(f"{folder} is a file, not a folder of checkpoints")
    if storage.exists(f"{inside}/{NAME}"):
        raise ValueError(f"{folder} is one checkpoint, not a folder of checkpoints")
    return storage, inside


def checkpoints_at(path: str) -> list[str]:
    """``path`` if it is a checkpoint or should be one, else the paths of those in this folder.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is a folder without any.
    """
    storage, inside = storage_of(path)
    if not storage.exists(inside):
        raise FileNotFoundError(f"there is no checkpoint or folder at {path}")
    is_one = inside.endswith(SUFFIX) or storage.exists(f"{inside}/{NAME}")
    if is_one or not storage.is_folder(inside) or is_ours(storage, inside):
        return [path]
    found = [each.path for each in checkpoints(path)]
    if not found:
        raise ValueError(f"there are no checkpoints in {path}")
    return found


def owner_of(storage: Storage, inside: str) -> Owner | None:
    """Who writes to a folder now; asks without taking the lock. Only Linux can say.

    Must not be asked of a folder that this process owns: closing a file gives its locks back.
    """
    path = os.path.join(inside, LOCK)
    if sys.platform != "linux" or not isinstance(storage, LocalStorage) or not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        trainer = _conflicts(file.fileno(), fcntl.F_RDLCK)  # writers share, trainers do not
        if not trainer and not _conflicts(file.fileno(), fcntl.F_WRLCK):
            return None
        try:
            said = dict(json.loads(file.read()))
        except ValueError:
            said = {}
    return Owner(str(said.get("host", "?")), int(said.get("pid", 0)), ended=not trainer)


def _conflicts(descriptor: int, kind: int) -> bool:
    """Whether another process holds a lock that keeps this one from a lock of this kind."""
    asked = struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def is_ours(storage: Storage, inside: str) -> bool:
    """Whether this package wrote what is left of a damaged checkpoint; in doubt it did not."""
    if storage.is_folder(inside):
        names = storage.names(inside)
        if any(map(_SHARD.fullmatch, names)):
            return True
        return NAME in names and FORMAT.encode() in storage.read(f"{inside}/{NAME}")
    with storage.open(inside) as file:  # the description is the first record
        return bool(file.read(30 + len(_FIRST_RECORD))[30:] == _FIRST_RECORD)
