"""Locks on bytes of a file that end with the process which took them, and not before.

POSIX locks are released when anything in the process opens and closes the file, as
``shutil.copytree`` does. Open file description locks are not, but a forked process shares them and
would keep them after its parent is killed, so it closes its copy first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
from contextlib import suppress
from functools import cache

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
    for each in _open:
        with suppress(OSError):  # another thread of the parent was about to
            os.close(each.descriptor)
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
