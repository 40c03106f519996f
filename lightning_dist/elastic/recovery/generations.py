"""Generations of workers, and the process groups of each.

Groups are torch's that can be reconfigured (torch 2.14): they get the members of the next
generation and stay the same objects. Until then their connections are shut down, so that all
collectives fail: a group of this process alone would compute with its own values only.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them silently
    DebugLevel,
    PrefixStore,
    get_debug_level,
)
from torch.distributed.constants import default_pg_timeout

from lightning_dist.base.log import get_logger
from lightning_dist.elastic.private import (
    backends_of,
    is_reconfigurable,
    no_member,
    number_groups_from,
    reconfigurable_group,
    reconfigure,
    set_ranks,
)
from lightning_dist.elastic.process.lifecycle import EXIT_EVICTED, EXIT_RESTART, Ended
from lightning_dist.elastic.recovery.connections import Connections, listening_ports
from lightning_dist.elastic.recovery.member import Member, RecoveryEnvironment, StoreLostError
from lightning_dist.elastic.recovery.protocol import (
    NOT_YET,
    Generation,
    Keys,
    WorkerReport,
)
from lightning_dist.ranks.agreement import Membership
from lightning_dist.ranks.failures import CollectiveError, is_of_collective
from lightning_dist.ranks.launch import RECOVERY_STORE, Launch

log = get_logger(__name__)


_CONNECT = timedelta(seconds=5)
"""Time limit of connecting the members of a group, all of whom have come."""
_CONNECT_ACCELERATOR = timedelta(seconds=60)
"""The same for other backends, which initialize a communicator."""
_KNOWN_SECONDS = 1.0
"""Time in which the loss of a process is known to all workers."""
_CPU = "gloo"
"""Backend of groups that exchange tensors of CPUs only."""


def init_alone(
    environment: RecoveryEnvironment,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """A default process group of this process only, which gets other members with a generation.

    Args:
        backend: None: gloo for CPUs, and NCCL where there is a GPU.
        timeout: of its collectives; None: torch's default.

    Raises:
        ValueError: a backend whose members cannot change.
    """
    if get_debug_level() == DebugLevel.DETAIL:
        raise ValueError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps process groups, whose ranks cannot change then, "
            "as recovery='in_process' needs; set it to INFO or OFF"
        )
    if backend == "nccl" or (backend is None and torch.cuda.is_available()):
        backend = "cpu:gloo,cuda:nccl"  # states are sent from CPU to CPU
    hook, worker = sys.excepthook, environment.worker
    group = reconfigurable_group(
        backend or _CPU,
        PrefixStore("default", environment.connect()),
        number=worker.place,
        name="recovery",
        timeout=timeout or default_pg_timeout,
    )
    sys.excepthook = partial(_print_with_rank, hook)  # torch's keeps the rank of now
    _require_reconfigurable(group)
    uuid = _ALONE + (worker.place << 32) + worker.incarnation
    for name, each in backends_of(group).items():
        handle = each.get_reconfigure_handle()
        reconfigure(each, uuid=uuid, handles=[handle], timeout=_timeout_of(name))
    set_ranks(group, [0])


def _timeout_of(backend: str) -> timedelta:
    return _CONNECT if backend == _CPU else _CONNECT_ACCELERATOR


def _require_reconfigurable(group: Any) -> None:
    for name, backend in backends_of(group).items():
        if not is_reconfigurable(backend):
            raise ValueError(
                f"recovery='in_process' needs process groups whose ranks can change, and backend "
                f"{name!r} of the default one was made otherwise: create it with "
                "lightning_dist.init_process_group(recovery='in_process'), with backend 'gloo' "
                "for CPUs; for NCCL with torch 2.14 set TORCH_DIST_USE_NCCL2=1 before"
            )


def _print_with_rank(hook: Callable[..., Any], *error: Any) -> None:
    """Begin each line of a traceback with the present rank, once there are others."""
    lines = io.StringIO()
    with redirect_stderr(lines):
        hook(*error)
    several = dist.is_initialized() and dist.get_world_size() > 1
    start = f"[rank{dist.get_rank()}]: " if several else ""
    sys.stderr.writelines(start + line for line in lines.getvalue().splitlines(keepends=True))


_ALONE = 1 << 62
"""More than the number of any group of a generation."""
_GROUPS = 1 << 12
"""More than there are groups in a generation."""


def is_alone() -> bool:
    """Whether this process recovers within itself, and has not met the others yet."""
    has_store = bool(os.environ.get(RECOVERY_STORE))
    several = Launch.from_env().world_size > 1
    return has_store and several and dist.is_initialized() and dist.get_world_size() == 1


class GenerationGroups:
    """The default process group of this process and others, whose members change.

    Args:
        environment: of this worker.
        gather: values of some workers by name, given a key, this one's and the names. Collective.
        connections: which get those of the groups.

    Raises:
        ValueError: the default group is none whose members can change.
    """

    def __init__(
        self,
        environment: RecoveryEnvironment,
        gather: Callable[[str, str, Sequence[str]], Sequence[str]],
        connections: Connections,
    ) -> None:
        world: Any = dist.group.WORLD
        _require_reconfigurable(world)
        self._worker, self._gather = environment.worker, gather
        self._store = environment.connect()
        self.backend = dist.get_backend_config(world)
        """Backend of the default group, and of groups for gradients."""
        self._groups: dict[str, list[dist.ProcessGroup]] = {self.backend: [world]}
        self._groups.setdefault(_CPU, [])
        self._connections = connections
        self._generation = Generation(NOT_YET)
        self._made = 0  # groups of this generation
        self._used = dict.fromkeys(self._groups, 0)  # those with this process, by backend

    def enter(self, generation: Generation) -> None:
        """Let the default group have the members of ``generation``. Collective."""
        self._connections.shut()
        self._generation, self._made = generation, 0
        self._used = dict.fromkeys(self._groups, 0)
        self.new(backend=self.backend)
        number_groups_from(_GROUPS * (generation.number + 1))

    def new(self, ranks: Sequence[int] | None = None, *, backend: str = _CPU) -> dist.ProcessGroup:
        """One more group, of all members or of ``ranks`` in their order.

        Collective among all members; on those that are not in it torch's ``NON_GROUP_MEMBER``.

        Args:
            backend: gloo, or :attr:`backend`.
        """
        members, own = self._generation.members, str(self._worker)
        ranks = [*range(len(members))] if ranks is None else [*ranks]
        number, self._made = self._made, self._made + 1
        if members.index(own) not in ranks:
            nothing: dist.ProcessGroup = no_member()
            return nothing
        groups, index = self._groups[backend], self._used[backend]
        if index == len(groups):
            groups.append(self._one_more(backend, name=f"recovery {backend} {index}"))
        self._used[backend] += 1
        self._connect(groups[index], ranks, number=number)
        return groups[index]

    def _one_more(self, backend: str, *, name: str) -> dist.ProcessGroup:
        return reconfigurable_group(
            backend,
            PrefixStore(name, self._store),
            number=self._worker.place,
            name=name,
            timeout=default_pg_timeout,
        )

    def _connect(self, group: dist.ProcessGroup, ranks: Sequence[int], *, number: int) -> None:
        backends, members = backends_of(group), self._generation.members
        handles = {name: each.get_reconfigure_handle() for name, each in backends.items()}
        key = Keys.handle(self._generation.number, number)
        here = json.dumps([handles, listening_ports(), group.group_name])
        of_all = self._gather(key, here, [members[rank] for rank in ranks])
        handles_of, ports, names = zip(*map(json.loads, of_all), strict=True)
        assert len({*names}) == 1, "they meet under the name of the group in torch's store"
        uuid = self._generation.number * _GROUPS + number
        with self._connections.opened({*chain(*ports)}):
            for name, backend in backends.items():
                if name != _CPU:  # its connections are not known
                    self._connections.aborts(backend.abort)
                theirs = [of_member[name] for of_member in handles_of]
                reconfigure(backend, uuid=uuid, handles=theirs, timeout=_timeout_of(name))
                if name != _CPU:  # once more, where the generation was broken meanwhile
                    self._connections.aborts(backend.abort)
        set_ranks(group, ranks)


_TRIES = 5
"""Generations of the same members without a step, after which an error is the user's."""


class Generations:
    """This worker among those that train together.

    Args:
        environment: of the worker.
        backend: of the default process group, if there is none yet; see :func:`init_alone`.
    """

    def __init__(self, environment: RecoveryEnvironment, *, backend: str | None = None) -> None:
        self.on_broken: Callable[[], None] = lambda: None
        """Called from a thread when this generation is known to be at its end, maybe repeatedly."""
        self._members: Membership | None = None
        self._connections = Connections()
        with self._needing_store():
            self.member = Member(environment, on_broken=self._break)
            """This worker in the launcher's store."""
            if not dist.is_initialized():
                init_alone(environment, backend=backend)
            self.groups = GenerationGroups(environment, self.member.gather, self._connections)
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
        size = len(generation.members)
        self._tries = 0 if generation.newcomers or size < self._size else self._tries + 1
        self._size = size
        if self._tries > _TRIES:
            raise RuntimeError(
                f"{_TRIES} generations of the same step have failed: {generation.reason}"
            ) from failure
        self._members = None
        self.groups.enter(generation)
        data, control = (self.groups.new(backend=self.groups.backend) for _ in range(2))
        number = generation.number
        members = self._members = Membership(generation=number, make=self.groups.new)
        if self.member.is_broken:  # a group may have been connected after the others were shut down
            self._connections.shut()
            raise CollectiveError("a member was lost while process groups were connected")
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
        # First: a collective of an accelerator that was aborted looks as if it were complete.
        self.on_broken()
        if (members := self._members) is not None:
            # gloo has been seen to wait on, in a collective that began as its sockets were shut.
            members.ranks.give_up()
        self._connections.shut()

    def end(self, reason: str, *, code: int) -> NoReturn:
        """End this process, and say why."""
        log.warning("elastic: this process exits with code %d: %s", code, reason)
        raise Ended(code)
