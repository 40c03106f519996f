"""Process groups of a generation, and how those of the one before are left behind.

gloo cannot abort a collective. So the connected sockets of a generation are noted when its groups
are made, and shut down when it is broken: a rank that waits in a collective fails at once.
They are those to a port on which a member listens for its groups, or to the store: another thread
may open a connection meanwhile, to an object store for instance.
Deleting a group may block until the threads in it have noticed, so a thread does that: each has
three threads and a dozen descriptors, too many to be kept for ever.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them silently
    HashStore,
    PrefixStore,
    Store,
)
from torch.distributed.constants import default_pg_timeout

from lightning_dist.base.private import new_group, set_group_timeout
from lightning_dist.elastic.private import all_groups, forget_group_numbers
from lightning_dist.ranks.launch import RECOVERY_STORE, Launch

_CONNECT = timedelta(seconds=10)
"""For the members of a generation to connect, and of the first collectives among them."""
_LAST_SECONDS = 2.0


def init_alone(*, timeout: timedelta | None = None) -> None:
    """A default process group of this process only, for what is made before it is admitted."""
    plain = sys.excepthook
    dist.init_process_group(
        "gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout or default_pg_timeout
    )
    sys.excepthook = plain  # torch's begins every line with [rank0], which is not known here


def is_alone() -> bool:
    """Whether this process recovers within itself, and has not met the others yet."""
    has_store = bool(os.environ.get(RECOVERY_STORE))
    several = Launch.from_env().world_size > 1
    return has_store and several and dist.is_initialized() and dist.get_world_size() == 1


class GenerationGroups:
    """The default process group of one generation after the other, and those that follow it."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._ports: set[int] = set()  # of members and of the store
        self._making: set[tuple[int, int]] | None = None  # sockets that were there before
        self._lock = threading.Lock()
        self._before: list[object] = []  # groups of the generation before, which may be in use
        # Not at the end of the process: a group that is deleted waits for its peers.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._before))
        self._deletes = threading.Thread()
        # torch's, which begins every line with [rank0] and calls the one before it, and that one:
        # a line would have a rank of every generation.
        self._excepthook = self._plain_excepthook = sys.excepthook
        atexit.register(self._end)

    @contextmanager
    def made(
        self, connect: Callable[[], Store], *, port: int, number: int, rank: int, world_size: int
    ) -> Iterator[None]:
        """The default group of generation ``number``; groups made inside are of it too. Collective.

        Args:
            connect: makes a client of the store of all members, whose connection is shut down with
                the others: members are waited for in it too.
            port: of that store.
        """
        self.shut()
        self._ports = {port}
        left, self._before[:] = [*self._before], all_groups()
        self._deletes = threading.Thread(target=left.clear, name="recovery groups", daemon=True)
        self._deletes.start()
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_group_numbers()  # of one that could not be made
        if sys.excepthook is self._excepthook:
            sys.excepthook = self._plain_excepthook
        self._plain_excepthook = sys.excepthook
        with self.growing():
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"gen-{number}", connect()),
                rank=rank,
                world_size=world_size,
                timeout=_CONNECT,
            )
            self._excepthook = sys.excepthook
            yield

    @contextmanager
    def growing(self) -> Iterator[None]:
        """Groups that are made inside are of this generation. Collective."""
        before = all_groups()
        with self._lock:
            self._making = _descriptors()
        ports: set[int] | None = None
        try:
            yield
            ports = self._ports = self._ports | _ports_of_all(_descriptors() - self._making)
        except BaseException:
            self.shut()  # others may wait for this process
            raise
        finally:
            with self._lock:
                self._sockets += self._new(ports)
                self._making = None
        for group in all_groups():
            if group not in before:
                set_group_timeout(group, default_pg_timeout)

    def new(self, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        """One more group, of all members or of ``ranks`` in their order.

        Collective among all members, inside :meth:`growing`; on those that are not in it what
        torch returns there.
        """
        return new_group(ranks, backend="gloo", timeout=_CONNECT)

    def _new(self, ports: Collection[int] | None = None) -> list[socket.socket]:
        """Connections of the groups that are being made; None: all, before ports are known."""
        if self._making is None:
            return []
        return _connected(_descriptors() - self._making, ports)

    def _end(self) -> None:
        self.shut()
        if self._deletes.is_alive():  # a thread in torch would abort a process that ends
            self._deletes.join(_LAST_SECONDS)

    def shut(self) -> None:
        """Shut down all connections of this generation: its collectives fail. From any thread.

        While groups are made there may be more of them later, and all that were opened since are
        shut down.
        """
        with self._lock:
            sockets, self._sockets = self._sockets + self._new(), []
        for each in sockets:
            with suppress(OSError):  # the peer was faster
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _descriptors() -> set[tuple[int, int]]:
    """Sockets of this process, by descriptor and inode."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _ports_of_all(descriptors: set[tuple[int, int]]) -> set[int]:
    """Ports on which any member listens with sockets that are new. Collective."""
    own: list[int] = []
    found: list[list[int]] = [[]] * dist.get_world_size()
    for each in _duplicates(descriptors):
        with each:
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                own.append(each.getsockname()[1])
    dist.all_gather_object(found, own)
    return {port for ports in found for port in ports}


def _connected(
    descriptors: set[tuple[int, int]], ports: Collection[int] | None
) -> list[socket.socket]:
    """Connections from or to one of ``ports``; None: all."""
    found = []
    for each in _duplicates(descriptors):
        ends: set[int] = set()
        with suppress(OSError):  # one that listens: gloo ends the process where it fails
            ends = {each.getpeername()[1], each.getsockname()[1]}
        if ends if ports is None else ends.intersection(ports):
            found.append(each)
        else:
            each.close()
    return found


def _duplicates(descriptors: set[tuple[int, int]]) -> list[socket.socket]:
    """Duplicates of TCP sockets, which are closed without closing another one by mistake."""
    found = []
    for number, _ in descriptors:
        with suppress(OSError):
            each = socket.socket(fileno=os.dup(number))
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found.append(each)
            else:
                each.close()
    return found
