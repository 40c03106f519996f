"""Worlds of several ranks in one process: real gloo groups, one per thread, over one HashStore.

The only place that makes multi-rank worlds of threads. A collective that one rank does not join
fails after ``TIMEOUT`` instead of hanging.
"""

import atexit
import os
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel

import lightning_dist.base.versions
from lightning_dist.measurement import exposure
from lightning_dist.ranks import Topology
from lightning_dist.ranks.channel import Channel, WaitLimit
from lightning_dist.ranks.levels import levels_of, nodes_of
from lightning_dist.reducer.network import Network, in_levels

TIMEOUT = timedelta(seconds=20)
_IS_NEW = hasattr(dist, "all_gather_single")
ALL_GATHER = "all_gather_single" if _IS_NEW else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if _IS_NEW else "reduce_scatter_tensor"
"""Names of these functions, which torch 2.13 has changed."""

T = TypeVar("T")


@dataclass
class _Past:
    """Groups of a world that has ended, and the ports at which it accepted their connections."""

    groups: list[dist.ProcessGroup]
    ports: set[int]


# A gloo group that is destroyed while its last collective is being freed deadlocks (it joins its
# thread while it holds the interpreter lock), so the groups of a world outlive the next worlds.
_RECENT: deque[_Past] = deque(maxlen=4)


@atexit.register
def shut_down_past_worlds() -> None:
    """Their connections stay open while the next world runs.

    A collective that nobody waits for may still run when the ranks have ended, and gloo waits as
    long as ``TIMEOUT`` for the end of a send whose connection is shut.
    """
    for past in _RECENT:
        if past.ports:
            _shut_down(past.ports)
            past.ports.clear()
        for group in past.groups:
            _world.pg_group_ranks.pop(group, None)


@dataclass
class Rank:
    """What one thread of a world knows."""

    rank: int
    size: int
    store: dist.Store
    device: Any
    barrier: threading.Barrier
    ranks_per_node: int | None = None
    alive: list[dist.ProcessGroup] = field(default_factory=list)
    made: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def group(self, name: str, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        """A gloo group over all ranks, or some; every one of them asks for the same names.

        The same one for the same name and ranks: reducers may follow each other in one world.
        """
        members = list(range(self.size) if ranks is None else ranks)
        name = f"{name} {members}"
        if name not in self.made:
            self.made[name] = self._new_group(name, members)
        return self.made[name]

    def _new_group(self, name: str, members: list[int]) -> dist.ProcessGroup:
        rank, size = members.index(self.rank), len(members)
        store = dist.PrefixStore(name, self.store)
        group = dist.ProcessGroup(store, rank, size)
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = TIMEOUT, [self.device]
        gloo = dist.ProcessGroupGloo(store, rank, size, options)
        gloo._set_sequence_number_for_group()
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.alive.append(group)
        if not _IS_NEW:  # torch asks for the ranks of a group in collectives
            _world.pg_group_ranks[group] = {member: at for at, member in enumerate(members)}
        return group

    def topology(self) -> Topology:
        per_host = self.ranks_per_node or 1
        return Topology(tuple(f"node{rank // per_host}" for rank in range(self.size)), self.rank)

    def network(self, tree: Sequence[Any] | None = None, *, leader: bool = False) -> Network:
        data, control, *levels = self.groups(tree, leader=leader)
        limit = WaitLimit()
        channels = Channel(data, limit=limit), Channel(control, limit=limit)
        flat = Network(*channels, self.topology(), torch.device("cpu"))
        if tree is None:
            return flat
        ready = iter(levels)
        return in_levels(flat, nodes_of(tree), leader=leader, new_group=lambda _: next(ready))

    def ddp(self, module: nn.Module, **arguments: object) -> DistributedDataParallel:
        return DistributedDataParallel(module, process_group=self.group("ddp"), **arguments)

    def groups(
        self, tree: Sequence[Any] | None = None, *, leader: bool = False
    ) -> list[dist.ProcessGroup]:
        """For ``compress_ddp``; with ``tree`` those of its levels too."""
        found = [self.group("payload"), self.group("flags")]
        if tree is not None:
            of_levels = [
                level.group_of(self.rank) for level in levels_of(nodes_of(tree), leader=leader)
            ]
            found += [self.group(f"level {i}", of) for i, of in enumerate(of_levels) if of]
        return found


def _core() -> set[int]:
    """One core for all threads of this process's worlds, another one for each worker of xdist.

    They take turns at one interpreter lock; to hand it to another core costs more than their work.
    """
    cores = sorted(os.sched_getaffinity(0))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return {cores[int(worker) % len(cores)]}


_version = cache(version)


@contextmanager
def _quick_start() -> Iterator[None]:
    """Measuring a link and reading metadata of packages are most of what a new reducer costs."""
    with (
        patch.object(exposure, "_PROBE_BYTES", 1 << 12),
        patch.object(lightning_dist.base.versions, "version", _version),
    ):
        yield


def _gather(own: Tensor, parts: list[Tensor] | None, **of: Any) -> dist.Work:
    options, group = dist.GatherOptions(), of["group"]
    options.rootRank = of["group_dst"]
    return group.gather([] if parts is None else [parts], [own], options)


if not _IS_NEW:  # that of torch asks for the rank of this process: a thread has another one
    vars(dist)["gather"] = _gather


@cache
def is_known_to_gloo(dtype: torch.dtype) -> bool:
    """Whether gloo takes it, and so DDP does: in torch 2.7 it takes no complex numbers."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, TIMEOUT)
    try:
        group.broadcast([torch.zeros(1, dtype=dtype)]).wait()
    except RuntimeError:
        return False
    return True


def _listening() -> set[int]:
    """Ports on which this process listens."""
    return {each.getsockname()[1] for each in _sockets() if _listens(each)}


def _listens(of: socket.socket) -> bool:
    return bool(of.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shut_down(ports: set[int]) -> None:
    """Shut down what was accepted at these ports.

    gloo closes both ends then, and their collectives fail: to keep the groups costs no descriptors,
    and to free them does not take as long as ``TIMEOUT``.
    """
    for each in _sockets():
        # Not those that listen: gloo ends the process where they fail.
        if each.getsockname()[1] in ports and not _listens(each):
            with suppress(OSError):  # gloo was faster
                each.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """Duplicates of the TCP sockets of this process, one after the other."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found


@_quick_start()
def run_threads(
    function: Callable[[Rank], T],
    size: int,
    *,
    ranks_per_node: int | None = None,
) -> list[T]:
    """Results of ``function`` on every rank of a world of ``size``, in rank order.

    Its groups are of no use after that: the next world shuts their connections down.
    """
    store, barrier = dist.HashStore(), threading.Barrier(size, timeout=60)
    before = _listening()
    # One for all groups: the thread of a device wakes up a hundred times a second, also for groups
    # that nobody uses any more, and those of a few worlds of 8 ranks fill a core.
    device = dist.ProcessGroupGloo.create_device(interface="lo")
    ports = _listening() - before
    ranks = [Rank(rank, size, store, device, barrier, ranks_per_node) for rank in range(size)]
    alive: list[dist.ProcessGroup] = []
    for rank in ranks:
        rank.alive = alive

    def guarded(rank: Rank) -> T:
        try:
            return function(rank)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size, initializer=os.sched_setaffinity, initargs=(0, _core())) as pool:
        futures = [pool.submit(guarded, rank) for rank in ranks]
        errors = [future.exception() for future in futures]
    shut_down_past_worlds()
    _RECENT.append(_Past(alive, ports))
    first = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    if first:
        raise first[0]
    return [future.result() for future in futures]
