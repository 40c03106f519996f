"""One trainer per folder: a lock that dies with its process."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass

from lightning_dist.checkpoint.disk.local import LocalStorage
from lightning_dist.checkpoint.disk.recovery import recover
from lightning_dist.checkpoint.disk.storage import storage_of

LOCK = ".lightning_dist.lock"
_TRAINER, _WRITER = 0, 1
"""Bytes of the lock file: one for the trainer, one for the writer that may outlive it."""


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


@dataclass
class Lock:
    """A POSIX lock on one byte of a folder's lock file; ends with the process, forks lack it.

    Two owners in one process are no conflict, several callbacks may share a folder: they share the
    lock, which closing any descriptor of the file would end.
    """

    descriptor: int
    owners: int = 1

    def release(self) -> None:
        """Give it back, once for every time it was given."""
        self.owners -= 1
        if self.owners == 0:
            for folder in [folder for folder, lock in _owned.items() if lock is self]:
                del _owned[folder]
            os.close(self.descriptor)


_owned: dict[tuple[int, str], Lock] = {}
"""By process, since a fork does not inherit locks, and folder."""


def own(folder: str, *, patience: float = 60.0) -> Lock | None:
    """Become the trainer that writes to ``folder``, and remove what dead ones left half done.

    None for object stores, which have no locks.

    Args:
        patience: seconds to wait for the writer of a trainer that has died, since it last wrote
            something.

    Raises:
        ValueError: another trainer writes there.
        OSError: the folder cannot be written.
    """
    storage, inside = storage_of(folder)
    if not isinstance(storage, LocalStorage):
        return None
    storage.make_folder(inside)
    key = os.getpid(), os.path.realpath(inside)
    if key in _owned and _is_named(_owned[key], inside):
        _owned[key].owners += 1
        return _owned[key]
    lock = _open(inside)
    if not _take(lock, _TRAINER):
        owner = _owner(lock)
        lock.release()
        raise ValueError(
            f"only one trainer may write to a checkpoint folder, and {folder} belongs to process "
            f"{owner.get('pid', '?')} on {owner.get('host', '?')}; wait for it, end it, or give "
            "this run another dirpath"
        )
    if not _is_named(lock, inside):  # somebody has just forgotten it
        lock.release()
        return own(folder, patience=patience)
    _await_writer(lock, storage, inside, patience=patience)
    fcntl.lockf(lock.descriptor, fcntl.LOCK_UN, 1, _WRITER)
    os.truncate(lock.descriptor, 0)
    os.pwrite(
        lock.descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0
    )
    try:
        recover(storage, inside)
    except BaseException:
        lock.release()
        raise
    _owned[key] = lock
    return lock


def _await_writer(lock: Lock, storage: LocalStorage, folder: str, *, patience: float) -> None:
    """Wait until the writer of a dead trainer has finished; it holds the other byte."""
    seen, since = -1, time.monotonic()
    while not _take(lock, _WRITER):
        written = sum(map(storage.tree_nbytes, storage.leftovers(folder)))
        if written != seen:
            seen, since = written, time.monotonic()
        elif time.monotonic() - since > patience:
            lock.release()
            raise ValueError(
                f"the trainer before this one has ended, but its writer still holds {folder} and "
                f"has written nothing for {patience:.0f} s; wait for it, or give this run another "
                "dirpath"
            )
        time.sleep(0.02)


def is_owned(folder: str) -> bool:
    """Whether this rank sees the lock that another has taken; always, on object stores."""
    storage, inside = storage_of(folder)
    return not isinstance(storage, LocalStorage) or storage.exists(os.path.join(inside, LOCK))


def owner_of(folder: str) -> Owner | None:
    """Who writes to a folder now; asks without taking the lock. Only Linux can say."""
    storage, inside = storage_of(folder)
    if not isinstance(storage, LocalStorage):
        return None
    if (os.getpid(), os.path.realpath(inside)) in _owned:  # asking would give the lock back
        return Owner(socket.gethostname(), os.getpid(), ended=False)
    trainer, writer, said = _holders(inside)
    if not trainer and not writer:
        return None
    return Owner(str(said.get("host", "?")), _pid(said), ended=trainer is None)


def is_settled(folder: str) -> bool:
    """Whether another process has become the trainer of ``folder`` and has cleaned up there.

    Only Linux can say; elsewhere always.
    """
    storage, inside = storage_of(folder)
    if sys.platform != "linux" or not isinstance(storage, LocalStorage):
        return True
    trainer, writer, said = _holders(inside)
    if trainer is None:
        return False
    if writer is not None:  # of the dead trainer before it, or its own: then it cleaned up before
        return _pid(said) == trainer
    return not storage.leftovers(inside)


def _holders(folder: str) -> tuple[int | None, int | None, dict[str, object]]:
    """Which other processes hold the trainer's and the writer's byte, and who the owner says to be.

    Must not be asked of a folder that this process owns: closing a file gives its locks back.
    """
    path = os.path.join(folder, LOCK)
    if sys.platform != "linux" or not os.path.exists(path):
        return None, None, {}
    with open(path, "rb") as file:
        trainer, writer = (_holder(file.fileno(), byte) for byte in (_TRAINER, _WRITER))
        try:
            said = dict(json.loads(file.read()))
        except ValueError:
            said = {}
    return trainer, writer, said


def _holder(descriptor: int, byte: int) -> int | None:
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, *_, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(pid)


def _pid(said: dict[str, object]) -> int:
    pid = said.get("pid", 0)
    return pid if isinstance(pid, int) else 0


def own_as_writer(folder: str) -> Lock | None:
    """Keep the folder from a next trainer until this writer has ended."""
    storage, inside = storage_of(folder)
    if not isinstance(storage, LocalStorage) or not os.path.isdir(inside):
        return None
    lock = _open(inside)
    fcntl.lockf(lock.descriptor, fcntl.LOCK_SH, 1, _WRITER)
    return lock


def forget(folder: str) -> None:
    """Remove the lock file of a folder that nobody owns any more; where somebody does, nothing."""
    storage, inside = storage_of(folder)
    path = os.path.join(inside, LOCK)
    if not isinstance(storage, LocalStorage) or not os.path.exists(path):
        return
    if (os.getpid(), os.path.realpath(inside)) in _owned:
        return
    lock = _open(inside)
    if _take(lock, _TRAINER) and _take(lock, _WRITER) and _is_named(lock, inside):
        os.unlink(path)
    lock.release()


def _open(folder: str) -> Lock:
    return Lock(os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))


def _is_named(lock: Lock, folder: str) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.descriptor), os.stat(os.path.join(folder, LOCK)))
    except FileNotFoundError:
        return False


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
