"""Network of a reducer: its groups, and the thread or stream that uses them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias
from weakref import WeakValueDictionary, finalize

import torch
import torch.distributed as dist

from lightning_dist.base.accelerator import DeviceEvent, device_module, is_accelerator
from lightning_dist.exchange.rounds import Allocate, ExchangeArguments
from lightning_dist.ranks import Topology
from lightning_dist.ranks.channel import Channel, WaitLimit
from lightning_dist.ranks.levels import Level, Nodes, levels_of, rows_of

Task = Callable[[], None]
Tasks = queue.SimpleQueue[Task | None]

_PATIENCE = 10.0
"""Seconds for a worker that is closed; one that nothing can stop is left behind."""

_POLL = 0.001
"""Seconds between two looks at an accelerator, which can only be waited for without a limit."""

_AT_EXIT = 2.0
"""Seconds for a worker that was not closed, where the process ends."""


class ExecutorThread:
    """One thread, started by the first task. For CPUs, where a wait for a collective blocks.

    It runs tasks one after the other, in the order in which they were submitted.

    A thread of our own because waiting in a gloo future callback deadlocks. An exit handler ends
    it: a thread that is inside torch when the interpreter stops its threads aborts the process.

    Args:
        device: an accelerator on which its tasks work.
    """

    failure: BaseException | None = None
    """The first error of a task. Ranks may be out of step, so no reducer exchanges after it."""

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        arguments = self._tasks, device
        self._thread = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
        self._end: finalize[..., ExecutorThread] | None = None

    def submit(self, task: Task) -> None:
        if self._end is None:
            self._thread.start()
            self._end = finalize(self, _end, self._tasks, self._thread)
        self._tasks.put(task)

    def drain(self, patience: float = _PATIENCE) -> bool:
        """Complete all submitted tasks; False if that takes more than ``patience`` seconds."""
        idle = threading.Event()
        self.submit(idle.set)
        return idle.wait(patience)

    def close(self, patience: float = _PATIENCE) -> bool:
        """As :meth:`drain`; no task may be submitted after it."""
        if self._end is not None:
            if self._end.detach() is not None:
                self._tasks.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(patience)
        return not self._thread.is_alive()


def _work(tasks: Tasks, device: torch.device | None) -> None:
    if device is not None and device.index is not None:
        # A thread begins on device 0, where every rank of a node would take memory for a context.
        torch.accelerator.set_device_index(device)
    while (task := tasks.get()) is not None:
        with torch.no_grad():
            task()
        del task  # or the last bucket's buffer would live until the next one


def _end(tasks: Tasks, thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():  # which may drop the last reference to its reducer
        thread.join(_AT_EXIT)


class SideStream:
    """One stream of an accelerator, where waiting only orders streams.

    Tasks are on it one after the other, as those of a :class:`ExecutorThread` on its thread.

    Args:
        worker: issues the tasks, so that the backward pass goes on launching meanwhile. None: they
            are issued at once, in one order with what the calling thread issues: for models that
            communicate in their backward pass, whose collectives NCCL wants in one order with ours.
    """

    failure: BaseException | None = None
    """The first error of a task, as of a worker."""

    def __init__(self, device: torch.device, worker: ExecutorThread | None) -> None:
        self._device, self._module = device, device_module(device)
        # With priority: a mean that arrives is not to wait for the kernels of the backward pass.
        self._stream, self._worker = self._module.Stream(device, priority=-1), worker

    def submit(self, task: Task) -> None:
        ready = self._module.Event(enable_timing=False)
        ready.record(self._module.current_stream(self._device))
        issue = partial(self._issue, ready, task)
        issue() if self._worker is None else self._worker.submit(issue)

    def _issue(self, ready: DeviceEvent, task: Task) -> None:
        self._stream.wait_event(ready)
        # The calling thread may have inherited an autocast.
        exact = torch.autocast(self._device.type, enabled=False)
        with self._module.stream(self._stream), torch.no_grad(), exact:
            task()

    def drain(self, patience: float = _PATIENCE) -> bool:
        """Complete all submitted tasks, also those of others on the thread."""
        end = time.monotonic() + patience
        if self._worker is not None and not self._worker.drain(patience):
            return False
        over = self._module.Event(enable_timing=False)
        over.record(self._stream)
        while not (ended := over.query()) and time.monotonic() < end:
            time.sleep(_POLL)
        return ended

    def close(self, patience: float = _PATIENCE) -> bool:
        """As :meth:`drain`; no task may be submitted after it."""
        over, self._worker = self.drain(patience), None  # which may be that of others too
        return over


Executor: TypeAlias = ExecutorThread | SideStream
"""Executor of the tasks of a reducer. Reducers over the same process groups share one: all ranks
issue their collectives in one order."""

_workers: WeakValueDictionary[torch.device, ExecutorThread] = WeakValueDictionary()


def executor_for(device: torch.device, *, in_order: bool = False) -> Executor:
    """One for the reducers of a model on ``device``.

    On an accelerator those of several models have one thread: NCCL wants collectives in one order
    on all ranks, also those of different groups. Each has a stream of its own.

    Args:
        in_order: issue collectives from the thread that hands tensors over; on accelerators.
    """
    name = "lightning_dist reducer"
    if not is_accelerator(device):
        return ExecutorThread(name)
    if in_order:
        return SideStream(device, None)
    worker = _workers.get(device)
    if worker is None:
        worker = _workers[device] = ExecutorThread(name, device)
    return SideStream(device, worker)


NewGroup = Callable[[Sequence[int]], dist.ProcessGroup]
"""Ranks of the world -> a group of them. Every member calls it, for its groups in one order."""


@dataclass(frozen=True)
class Network:
    """Groups over which gradients are averaged: all ranks of ``data``, or ``intra`` smaller groups
    first.

    Each row of the gathered state is that of a rank, or of the ranks of a node together. The mean
    over the rows is the residual of the model, whatever they are.
    """

    data: Channel  # payloads
    control: Channel  # a few flags a step, which must not queue behind payloads
    topology: Topology
    device: torch.device
    intra: IntraLevel | None = None
    row_of: tuple[int, ...] = ()  # row of the state of every rank; empty: one for each
    plans_for: torch.device | None = None  # another device, of which bytes are counted

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def rank(self) -> int:
        return self.topology.rank

    @property
    def whole_buckets(self) -> bool:
        """Whether units are whole buckets and not pieces that overlap."""
        return is_accelerator(self.plans_for or self.device)

    @property
    def limit(self) -> WaitLimit:
        """Limit of every wait for a collective of the network."""
        return self.data.limit

    def where(self, allocate: Allocate | None = None) -> ExchangeArguments:
        """Arguments of an exchange of payloads, in memory of its own by default."""
        return ExchangeArguments(
            channel=self.data, topology=self.topology, device=self.device, allocate=allocate
        )

    @property
    def state(self) -> Channel:
        """For state between steps: not watched, as it belongs to no step."""
        return Channel(self.data.group, name="state", limit=self.limit)

    @property
    def rows(self) -> int:
        """Rows of the gathered state of all ranks."""
        return max(self.row_of) + 1 if self.row_of else self.world_size

    @property
    def row(self) -> int:
        """Row that this rank has a part of."""
        return self.row_of[self.rank] if self.row_of else self.rank

    @property
    def is_first_of_row(self) -> bool:
        """Whether this rank is the first of its row."""
        return not self.row_of or self.row_of.index(self.row) == self.rank

    @property
    def channels(self) -> list[Channel]:
        """Used by this rank in a step: of payloads from the inside out, and of flags."""
        if self.intra is None:
            return [self.data, self.control]
        inter = self.intra.inter
        return [self.intra.data, *([] if inter is None else [inter.data]), self.control]


@dataclass(frozen=True)
class IntraLevel:
    """The group of the ranks of this node."""

    data: Channel  # payloads
    topology: Topology  # of the group
    level: Level
    inter: Network | None  # between nodes, flat; None on ranks that do not go on there


def in_levels(network: Network, nodes: Nodes, *, leader: bool, new_group: NewGroup) -> Network:
    """``network`` with a group inside ``nodes`` and then one between them. Collective."""
    topology, limit = network.topology, network.limit
    network = replace(network, row_of=rows_of(nodes))
    inside, between = levels_of(nodes, leader=leader)
    inner, others = inside.group_of(topology.rank), between.group_of(topology.rank)
    assert inner is not None, "every rank is on a node"
    intra, inter = new_group(inner), None if others is None else new_group(others)
    outer = None
    if inter is not None and others is not None:
        channel, flags = (Channel(inter, name=name, limit=limit) for name in ("inter", "control"))
        outer = replace(network, data=channel, control=flags, topology=topology.among(others))
    level = IntraLevel(
        Channel(intra, name="intra", limit=limit), topology.among(inner), inside, outer
    )
    places = replace(topology, intra_group=intra, inter_group=inter)
    return replace(network, intra=level, topology=places)
