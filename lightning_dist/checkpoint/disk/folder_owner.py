"""One trainer per folder: a lock that dies with its process, and cleaning up after the dead."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass

from lightning_dist.checkpoint.disk.manifest import NAME
from lightning_dist.checkpoint.disk.storage import LocalStorage, storage_of

LOCK = ".lightning_dist.lock"
_TRAINER, _WRITER = 0, 1
"""Bytes of the lock file: one for the trainer, one for the writer that may outlive it."""


@dataclass
class Lock:
    """A POSIX lock on one byte of a folder's lock file; ends with the process, forks lack it.

    Two owners in one process are no conflict: several callbacks may share a folder.
    """

    descriptor: int

    def release(self) -> None:
        os.close(self.descriptor)


def own(folder: str, *, patience: float = 60.0) -> Lock | None:
    """Become the trainer that writes to ``folder``, and remove what dead ones left half done.

    None for object stores, which have no locks.

    Args:
        patience: seconds to wait for the writer of a trainer that has died.

    Raises:
        ValueError: another trainer writes there.
        OSError: the folder cannot be written.
    """
    storage, inside = storage_of(folder)
    if not isinstance(storage, LocalStorage):
        return None
    storage.make_folder(inside)
    lock = _open(inside)
    if not _take(lock, _TRAINER):
        owner = _owner(lock)
        lock.release()
        raise ValueError(
            f"only one trainer may write to a checkpoint folder, and {folder} belongs to process "
            f"{owner.get('pid', '?')} on {owner.get('host', '?')}; wait for it, end it, or give "
            "this run another dirpath"
        )
    deadline = time.monotonic() + patience
    while not _take(lock, _WRITER):  # of a dead trainer: it has something to finish
        if time.monotonic() > deadline:
            lock.release()
            raise ValueError(
                f"the trainer before this one has ended, but its writer still works in {folder} "
                f"after {patience:.0f} s; wait for it, or give this run another dirpath"
            )
        time.sleep(0.02)
    fcntl.lockf(lock.descriptor, fcntl.LOCK_UN, 1, _WRITER)
    os.truncate(lock.descriptor, 0)
    os.pwrite(
        lock.descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0
    )
    recover(storage, inside)
    return lock


def own_as_writer(folder: str) -> Lock | None:
    """Keep the folder from a next trainer until this writer has ended."""
    storage, inside = storage_of(folder)
    if not isinstance(storage, LocalStorage) or not os.path.isdir(inside):
        return None
    lock = _open(inside)
    fcntl.lockf(lock.descriptor, fcntl.LOCK_SH, 1, _WRITER)
    return lock


def recover(storage: LocalStorage, folder: str) -> None:
    """Finish or undo what a killed writer left in ``folder``; touches nothing with another name."""
    for path in storage.leftovers(folder):
        target = os.path.join(folder, os.path.basename(path)[1:].rsplit(".", 1)[0])
        complete = ".tmp-" in os.path.basename(path) and os.path.exists(os.path.join(path, NAME))
        if complete and not os.path.lexists(target):
            storage.publish(path, target)
        else:
            storage.remove(path)


def _open(folder: str) -> Lock:
    return Lock(os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))


def _take(lock: Lock, byte: int) -> bool:
    try:
        fcntl.lockf(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _owner(lock: Lock) -> dict[str, object]:
    try:
        return dict(json.loads(os.pread(lock.descriptor, 4096, 0)))
    except ValueError:
        return {}
