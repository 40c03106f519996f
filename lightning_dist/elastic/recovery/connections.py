"""Connections of process groups, which end the collectives that wait in them.

gloo cannot abort a collective: a rank that waits in one fails when its sockets are shut down. Which
they are, gloo does not tell: those that were opened while a group was connected, from or to a port
on which one of its members listens. Another thread may open a connection meanwhile, to an object
store for instance.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

_Sockets = set[tuple[int, int]]
"""By descriptor and inode."""


class Connections:
    """Connections of all process groups of a generation."""

    def __init__(self) -> None:
        self._aborts: list[Callable[[], None]] = []
        self._open: list[socket.socket] = []
        self._before: _Sockets | None = None  # while a group is connected
        self._ports: Collection[int] = ()
        self._lock = threading.Lock()

    @contextmanager
    def opened(self, ports: Collection[int]) -> Iterator[None]:
        """Context in which connections from or to ``ports`` are noted as the generation's."""
        with self._lock:
            self._before, self._ports = _sockets(), ports
        try:
            yield
        finally:
            with self._lock:
                self._open += self._new()
                self._before = None

    def aborts(self, call: Callable[[], None]) -> None:
        """Add the abort of a backend, which :meth:`shut` calls once."""
        with self._lock:
            self._aborts.append(call)

    def shut(self) -> None:
        """Shut them down, so that collectives fail. From any thread.

        While a group is connected there may be more of them later.
        """
        with self._lock:
            closed, self._open = self._open + self._new(), []
            aborts, self._aborts = self._aborts, []
        for abort in aborts:
            with suppress(RuntimeError):  # of a group that is being connected
                abort()
        for connection in closed:
            with suppress(OSError):  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _new(self) -> list[socket.socket]:
        if self._before is None:
            return []
        connections = []
        for duplicate in _duplicates(_sockets() - self._before):
            ends: set[int] = set()
            with suppress(OSError):  # one that listens: gloo ends the process where it fails
                ends = {duplicate.getpeername()[1], duplicate.getsockname()[1]}
            if ends.intersection(self._ports):
                connections.append(duplicate)
            else:
                duplicate.close()
        return connections


def listening_ports() -> list[int]:
    """Ports on which this process listens."""
    ports = []
    for duplicate in _duplicates(_sockets()):
        with duplicate:
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.append(duplicate.getsockname()[1])
    return ports


def _sockets() -> _Sockets:
    """All sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _duplicates(found: _Sockets) -> list[socket.socket]:
    """Duplicates of TCP sockets, which are closed without closing another one by mistake."""
    duplicates = []
    for number, _ in found:
        with suppress(OSError):
            duplicate = socket.socket(fileno=os.dup(number))
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                duplicates.append(duplicate)
            else:
                duplicate.close()
    return duplicates
