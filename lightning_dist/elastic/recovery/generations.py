"""Generations of workers, and the process groups of each.

gloo cannot abort a collective. So the connected sockets of a generation are noted when its groups
are made, and shut down when it is broken: a rank that waits in a collective fails at once. They are
those to a port on which a member listens for its groups, or to the store: another thread may open a
connection meanwhile, to an object store for instance. Deleting a group may block until the threads
in it have noticed, so a thread does that: each has three threads and a dozen descriptors, too many
to be kept for ever.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them silently
    HashStore,
    PrefixStore,
    Store,
)
from torch.distributed.constants import default_pg_timeout

from lightning_dist.base.log import get_logger
from lightning_dist.base.private import new_group, set_group_timeout
from lightning_dist.elastic.private import all_groups, forget_group_numbers
from lightning_dist.elastic.process.lifecycle import EXIT_EVICTED, EXIT_RESTART, Ended
from lightning_dist.elastic.recovery.member import Member, RecoveryEnvironment, StoreLostError
from lightning_dist.elastic.recovery.protocol import Generation, WorkerReport
from lightning_dist.ranks.agreement import Membership
from lightning_dist.ranks.failures import CollectiveError, is_of_collective
from lightning_dist.ranks.launch import RECOVERY_STORE, Launch

log = get_logger(__name__)


_CONNECT = timedelta(seconds=10)
"""Time limit of connecting the members of a generation, and of their first collectives."""
_LAST_SECONDS = 2.0
_KNOWN_SECONDS = 1.0
"""Time in which the loss of a process is known to all workers."""


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
        for connection in sockets:
            with suppress(OSError):  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _descriptors() -> set[tuple[int, int]]:
    """Sockets of this process, by descriptor and inode."""
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode):
                descriptors.add((int(name), status.st_ino))
    return descriptors


def _ports_of_all(descriptors: set[tuple[int, int]]) -> set[int]:
    """Ports on which any member listens with sockets that are new. Collective."""
    own_ports: list[int] = []
    by_rank: list[list[int]] = [[]] * dist.get_world_size()
    for duplicate in _duplicates(descriptors):
        with duplicate:
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                own_ports.append(duplicate.getsockname()[1])
    dist.all_gather_object(by_rank, own_ports)
    return {port for ports in by_rank for port in ports}


def _connected(
    descriptors: set[tuple[int, int]], ports: Collection[int] | None
) -> list[socket.socket]:
    """Connections from or to one of ``ports``; None: all."""
    connections = []
    for duplicate in _duplicates(descriptors):
        ends: set[int] = set()
        with suppress(OSError):  # one that listens: gloo ends the process where it fails
            ends = {duplicate.getpeername()[1], duplicate.getsockname()[1]}
        if ends if ports is None else ends.intersection(ports):
            connections.append(duplicate)
        else:
            duplicate.close()
    return connections


def _duplicates(descriptors: set[tuple[int, int]]) -> list[socket.socket]:
    """Duplicates of TCP sockets, which are closed without closing another one by mistake."""
    duplicates = []
    for number, _ in descriptors:
        with suppress(OSError):
            duplicate = socket.socket(fileno=os.dup(number))
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                duplicates.append(duplicate)
            else:
                duplicate.close()
    return duplicates


_TRIES = 5
"""Generations of the same members without a step, after which an error is the user's."""


class Generations:
    """This worker among those that train together.

    Args:
        environment: of the worker.
    """

    def __init__(self, environment: RecoveryEnvironment) -> None:
        self.on_broken: Callable[[], None] = lambda: None
        """Called from a thread when this generation is known to be at its end, maybe repeatedly."""
        self.groups = GenerationGroups()
        self._members: Membership | None = None
        with self._needing_store():
            self.member = Member(environment, on_broken=self._break)
            """This worker in the launcher's store."""
        self._tries = self._size = 0

    @contextmanager
    def _needing_store(self) -> Iterator[None]:
        """End this process if the store is gone inside: nobody knows then who takes part."""
        try:
            yield
        except StoreLostError as error:
            self.end(str(error), code=EXIT_RESTART)

    def finds_others(self) -> bool:
        """Whether there is a generation already, so that this worker joins others."""
        with self._needing_store():
            return self.member.finds_others()

    def announce(self, facts: Mapping[str, str]) -> Generation:
        """Say that this worker is ready, and wait for the first generation with it."""
        with self._needing_store():
            return self.member.announce(facts)

    def after(self, report: WorkerReport) -> Generation:
        """End this generation here, and wait for the next one."""
        with self._needing_store():
            return self.member.report(report)

    def lost(self, error: RuntimeError) -> None:
        """A collective has failed; raises ``error`` if that is nobody's loss."""
        if isinstance(error, StoreLostError):
            self.end(str(error), code=EXIT_RESTART)
        if not self.is_loss(error):
            raise error
        self.member.abort(str(error))

    def is_loss(self, error: BaseException) -> bool:
        """Whether ``error`` is that of a collective, or comes with the loss of a member.

        Code of a user's may wait for a collective outside of torch's functions. So this waits
        until the loss of a member must be known here.
        """
        return isinstance(error, RuntimeError) and (
            is_of_collective(error) or self.member.learns_of_loss(_KNOWN_SECONDS)
        )

    def end_if_lost(self, error: BaseException) -> None:
        """End this process if ``error`` is that of a rank lost outside of a training step.

        Nothing else is repeated: all ranks restart from the newest checkpoint.
        """
        if self.is_loss(error):
            traceback.print_exception(error)
            self.member.abort(str(error))
            self.end(
                "a rank was lost outside of training steps, so all restart from the newest "
                f"checkpoint: {str(error)[:200]}",
                code=EXIT_RESTART,
            )

    def enter(
        self, generation: Generation, *, has_state: bool, failure: BaseException | None = None
    ) -> tuple[Membership, dist.ProcessGroup, dist.ProcessGroup]:
        """Make the groups of ``generation``: the members', and two more of all. Collective.

        Args:
            has_state: this worker is where the training is.
            failure: what has ended the generation before here.

        Raises:
            ValueError: this worker is of another training.
            RuntimeError: a member is lost meanwhile.
        """
        self._require_place(generation, has_state=has_state)
        rank, size = generation.members.index(self.member.name), len(generation.members)
        self._tries = 0 if generation.newcomers or size < self._size else self._tries + 1
        self._size = size
        if self._tries > _TRIES:
            raise RuntimeError(
                f"{_TRIES} generations of the same step have failed: {generation.reason}"
            ) from failure
        self._members = None
        self.member.rendezvous()
        number, member = generation.number, self.member
        with self.groups.made(
            member.connect, port=member.port, number=number, rank=rank, world_size=size
        ):
            data, control = self.groups.new(), self.groups.new()
            members = self._members = Membership(generation=number, make=self.groups.new)
        if self.member.is_broken:
            self.groups.shut()
            raise CollectiveError("a member was lost while process groups were created")
        return members, data, control

    def _require_place(self, generation: Generation, *, has_state: bool) -> None:
        if why := generation.refused.get(self.member.name):
            raise ValueError(
                "the script, settings or packages of this worker differ from those of the training "
                f"that it would join: {why}; start the same script with the same packages on all "
                "nodes"
            )
        if generation.ends:
            self.end(generation.ends, code=EXIT_RESTART)
        if self.member.name not in generation.members:
            self.end("a generation was formed without this worker", code=EXIT_EVICTED)
        if self.member.name in generation.heals and has_state:
            self.end("this worker is behind the others", code=EXIT_RESTART)

    def took_step(self) -> None:
        """A step is done in this generation."""
        self._tries = 0

    def _break(self) -> None:
        self.groups.shut()
        if (members := self._members) is not None:
            # gloo has been seen to wait on, in a collective that began as its sockets were shut.
            members.ranks.give_up()
        self.on_broken()

    def end(self, reason: str, *, code: int) -> NoReturn:
        """End this process, and say why."""
        log.warning("elastic: this process exits with code %d: %s", code, reason)
        raise Ended(code)
