"""Owner of a folder: the one trainer that writes there, and its lock.

A lock ends with the process that took it, and not before. POSIX locks are released when anything in
the process opens and closes the file, as ``shutil.copytree`` does. Open file description locks are
not, but a forked process shares them and would keep them after its parent is killed, so it closes
its copy first.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from lightning_dist.base.log import get_logger
from lightning_dist.checkpoint.disk.scan import recover
from lightning_dist.checkpoint.disk.storage import storage_of
from lightning_dist.checkpoint.disk.storage.local import LocalStorage

log = get_logger(__name__)


_FLOCK = "hhqqi"
"""``struct flock`` of Linux: type, whence, start, length, process."""
_KINDS = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_UNLCK: fcntl.LOCK_UN}
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class NoLocksError(OSError):
    """The file system has no locks."""


class LockFile:
    """A file whose bytes are locks; it is made if it is not there.

    Raises:
        OSError: it cannot be opened for writing.
    """

    def __init__(self, path: str) -> None:
        _close_in_forks()
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _open.add(self)
        # With POSIX locks: FUSE tells its server of the end of no others when a process is killed.
        self.is_of_process = sys.platform != "linux" or is_fuse(os.fstat(self.descriptor).st_dev)

    def take(self, byte: int, *, wait: bool = False, shared: bool = False) -> bool:
        """Lock a byte; returns whether this process has it now.

        Raises:
            NoLocksError: the file system has no locks.
        """
        try:
            self._set(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte, wait=wait)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def give(self, byte: int) -> None:
        """Unlock a byte."""
        self._set(fcntl.F_UNLCK, byte, wait=True)

    def _set(self, kind: int, byte: int, *, wait: bool) -> None:
        try:
            try:
                if not self.is_of_process:
                    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
                    asked = struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)
                    fcntl.fcntl(self.descriptor, command, asked)
                    return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_of_process = True  # a system without them
            fcntl.lockf(self.descriptor, _KINDS[kind] | (0 if wait else fcntl.LOCK_NB), 1, byte)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                raise NoLocksError(*error.args) from error
            raise

    def is_named(self) -> bool:
        """Whether the path still shows this file."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    @property
    def is_open(self) -> bool:
        """Whether it is open, and not inherited from the process that has forked this one."""
        return self in _open

    def close(self) -> None:
        """Unlock everything."""
        if self.is_open:
            _open.remove(self)
            os.close(self.descriptor)


_open: set[LockFile] = set()
"""Those of this process, for its forks."""


@cache
def _close_in_forks() -> None:
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    for file in _open:
        with suppress(OSError):  # another thread of the parent was about to
            os.close(file.descriptor)
    _open.clear()


def is_taken(descriptor: int, byte: int) -> bool:
    """Whether another file description, or another process, has locked a byte. Linux only."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind: int = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def is_fuse(device: int, mounts: str | None = None) -> bool:
    """Whether FUSE serves the file system with this device number.

    Args:
        mounts: as of ``/proc/self/mountinfo``, which is read if None.
    """
    if mounts is None:
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
                mounts = file.read()
        except OSError:
            return False
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = (line.partition(" - ") for line in mounts.splitlines())
    return any(
        mount.split()[2] == number and kind.startswith("fuse") for mount, _, kind in lines if kind
    )


LOCK, _MARK = ".lightning_dist.lock", ".lightning_dist.unlocked"
"""The second one is there while a trainer writes that locks nothing."""
_TRAINER, _WRITER, _SETTLED, _CHANGE = range(4)
"""Bytes of the lock file: for the trainer; for its writers, which may outlive it; for the trainer
once it has cleaned up; for a process about to become the trainer, or to remove the file."""
_POLL = 0.02


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
    """A folder of which this process is the trainer, or its writer.

    Two owners in one process are no conflict, several callbacks may share a folder: they share the
    lock.
    """

    folder: str
    file: LockFile
    owners: int = 1
    is_real: bool = True
    """Whether others are kept out."""

    def release(self) -> None:
        """Release it; as often as :func:`own` returned it."""
        self.owners -= 1
        if self.owners == 0:
            for key in [key for key, lock in _owned.items() if lock is self]:
                del _owned[key]
            if not self.file.is_open:  # a fork, which owns nothing
                return
            named = self.file.is_named()
            self.file.close()
            with suppress(OSError):  # the folder may be gone, or read-only by now
                if self.is_real:
                    forget(self.folder)
                elif named:
                    os.unlink(self.file.path)


_owned: dict[tuple[int, str], Lock] = {}
"""By process, since a fork does not inherit locks, and folder."""


def own(
    folder: str,
    *,
    patience: float = 60.0,
    lock: bool = True,
    clean: bool = True,
    trainer_patience: float = 0.0,
) -> Lock | None:
    """Become the trainer that writes to ``folder``, and remove what dead ones left half done.

    None for object stores, which have no locks: what nobody has touched for a day is removed.

    Args:
        patience: seconds to wait for the writer of a trainer that has died, since it last wrote
            something.
        lock: False: keep nobody out, and remove nothing, for a writer may be at work on it.
        clean: whether to remove what was left half done.
        trainer_patience: seconds to wait for a trainer that writes there, where this process takes
            its place: one that was evicted or killed may still have to end.

    Raises:
        ValueError: another trainer writes there, or the file system has no locks.
        OSError: the folder cannot be written.
    """
    storage, inside = storage_of(folder)
    if not isinstance(storage, LocalStorage):
        if lock and clean:
            try:
                recover(storage, inside)
            except OSError as error:  # of no importance for what is saved next
                log.warning(
                    "Partial files of killed writers in %s were not removed: %s", folder, error
                )
        return None
    storage.make_folder(inside)
    key = os.getpid(), os.path.realpath(inside)
    if key in _owned and _owned[key].file.is_named():
        _owned[key].owners += 1
        return _owned[key]
    waits = False
    if not lock:
        owned = Lock(inside, LockFile(os.path.join(inside, _MARK)), is_real=False)
    else:
        try:
            begin = time.monotonic()
            while not isinstance(locked := _lock(storage, folder, inside, patience=patience), Lock):
                if time.monotonic() - begin >= trainer_patience:
                    raise _belongs_to_another(folder, locked)
                if not waits:
                    waits = True
                    log.warning(
                        "%s belongs to process %s on %s; waiting up to %.0f s for its end",
                        folder,
                        locked.get("pid", "?"),
                        locked.get("host", "?"),
                        trainer_patience,
                    )
                time.sleep(_POLL)
            owned = locked
            if clean:
                _clean(owned, storage)
        except NoLocksError as error:
            raise ValueError(
                f"The file system of {folder} has no file locks ({error}), so another trainer in "
                "this folder cannot be detected; if there is none, set lock=False (ckpt prune: "
                "--no-lock)"
            ) from error
    _owned[key] = owned
    return owned


def _belongs_to_another(folder: str, owner: dict[str, object]) -> ValueError:
    return ValueError(
        f"Only one trainer may write to a checkpoint folder, and {folder} belongs to process "
        f"{owner.get('pid', '?')} on {owner.get('host', '?')}; wait for it, end it, or give this "
        "run another dirpath"
    )


def _lock(
    storage: LocalStorage, folder: str, inside: str, *, patience: float
) -> Lock | dict[str, object]:
    """The lock, or the entry of the trainer that holds it."""
    lock = Lock(inside, _open_to_change(inside))
    try:
        taken = lock.file.take(_TRAINER)
        lock.file.give(_CHANGE)
        if not taken:
            owner = _entry(lock.file.descriptor)
            lock.file.close()
            return owner
        _await_writer(lock, storage, folder, patience=patience)
        lock.file.give(_WRITER)
        _sign(lock)
    except BaseException:
        lock.file.close()
        raise
    return lock


def _clean(lock: Lock, storage: LocalStorage) -> None:
    try:
        recover(storage, lock.folder)
        lock.file.take(_SETTLED)
    except BaseException:
        lock.release()
        raise


def _await_writer(lock: Lock, storage: LocalStorage, folder: str, *, patience: float) -> None:
    """Wait until the writer of a dead trainer has finished; it holds the other byte."""
    seen, since = -1, time.monotonic()
    while not lock.file.take(_WRITER):
        written = sum(map(storage.tree_nbytes, storage.leftovers(lock.folder)))
        if written != seen:
            seen, since = written, time.monotonic()
        elif time.monotonic() - since > patience:
            raise ValueError(
                f"The previous trainer has ended, but its writer still holds {folder} and has "
                f"written nothing for {patience:.0f} s; wait for it, or give this run another "
                "dirpath"
            )
        time.sleep(_POLL)


def is_owned(folder: str) -> bool:
    """Whether this rank sees the lock that another has taken; always, on object stores."""
    storage, inside = storage_of(folder)
    if not isinstance(storage, LocalStorage):
        return True
    return any(storage.exists(os.path.join(inside, name)) for name in (LOCK, _MARK))


def owner_of(folder: str) -> Owner | None:
    """The current owner of a folder, found without taking the lock. Only Linux can say."""
    storage, inside = storage_of(folder)
    if not isinstance(storage, LocalStorage):
        return None
    if (os.getpid(), os.path.realpath(inside)) in _owned:  # asking might release the lock
        return Owner(socket.gethostname(), os.getpid(), ended=False)
    trainer, writer, _, entry = _holders(inside)
    if not trainer and not writer:
        return None
    return Owner(str(entry.get("host", "?")), _pid(entry), ended=not trainer)


def is_settled(folder: str) -> bool:
    """Whether another process has become the trainer of ``folder`` and has cleaned up there.

    Only Linux can say; elsewhere always.
    """
    storage, inside = storage_of(folder)
    if sys.platform != "linux" or not isinstance(storage, LocalStorage):
        return True
    return _holders(inside)[2]


def _holders(folder: str) -> tuple[bool, bool, bool, dict[str, object]]:
    """Which of the first three bytes other processes hold, and the entry of the owner.

    Not for a folder that this process owns: closing a file releases POSIX locks.
    """
    path = os.path.join(folder, LOCK)
    if sys.platform != "linux" or not os.path.exists(path):
        return False, False, False, {}
    with open(path, "rb") as file:
        try:
            trainer, writer, settled = (
                is_taken(file.fileno(), byte) for byte in (_TRAINER, _WRITER, _SETTLED)
            )
        except OSError:  # no locks: nobody can say
            return False, False, False, {}
        return trainer, writer, settled, _entry(file.fileno())


def _entry(descriptor: int) -> dict[str, object]:
    try:
        return dict(json.loads(os.pread(descriptor, 4096, 0)))
    except ValueError:
        return {}


def _sign(lock: Lock) -> None:
    entry = {"host": socket.gethostname(), "pid": os.getpid()}
    os.truncate(lock.file.descriptor, 0)
    os.pwrite(lock.file.descriptor, json.dumps(entry).encode(), 0)


def _pid(entry: dict[str, object]) -> int:
    pid = entry.get("pid", 0)
    return pid if isinstance(pid, int) else 0


def own_as_writer(folder: str) -> Lock | None:
    """Keep the folder from a next trainer until this writer has ended."""
    storage, inside = storage_of(folder)
    if not isinstance(storage, LocalStorage) or not os.path.isdir(inside):
        return None
    lock = Lock(inside, LockFile(os.path.join(inside, LOCK)))
    lock.file.take(_WRITER, wait=True, shared=True)
    return lock


def lock_to_send(folder: str) -> LockFile | None:
    """The writer's lock, for the process that is given its descriptor; None where it must take it.

    POSIX locks stay with the process that took them, and closing another descriptor of the file
    would release those of the trainer.
    """
    owned = _owned.get((os.getpid(), os.path.realpath(storage_of(folder)[1])))
    if owned is not None and owned.file.is_of_process:
        return None
    lock = own_as_writer(folder)
    if lock is not None and lock.file.is_of_process:
        lock.file.close()
        return None
    return None if lock is None else lock.file


def forget(folder: str) -> None:
    """Remove the lock file of a folder that nobody owns any more; where somebody does, nothing."""
    storage, inside = storage_of(folder)
    path = os.path.join(inside, LOCK)
    if not isinstance(storage, LocalStorage) or not os.path.exists(path):
        return
    if (os.getpid(), os.path.realpath(inside)) in _owned:
        return
    file = _open_to_change(inside)
    try:
        if file.take(_TRAINER) and file.take(_WRITER):
            os.unlink(path)
    finally:
        file.close()


def _open_to_change(folder: str) -> LockFile:
    """The lock file that has the name, of which nobody else becomes the owner meanwhile."""
    while True:
        file = LockFile(os.path.join(folder, LOCK))
        try:
            file.take(_CHANGE, wait=True)
            if file.is_named():
                return file
        except BaseException as error:
            if isinstance(error, NoLocksError) and os.stat(file.path).st_size == 0:
                os.unlink(file.path)  # made just now, and of no use
            file.close()
            raise
        file.close()  # somebody has just removed it
