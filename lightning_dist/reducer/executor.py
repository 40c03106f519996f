"""Executor of reducers: one ordered queue, beside the backward pass."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from weakref import WeakValueDictionary, finalize

import torch
from typing_extensions import override

from lightning_dist.base.accelerator import DeviceEvent, device_module, is_accelerator

Task = Callable[[], None]
Tasks = queue.SimpleQueue[Task | None]

_PATIENCE = 10.0
"""Seconds for a worker that is closed; one that nothing can stop is left behind."""

_POLL = 0.001
"""Seconds between two looks at an accelerator, which can only be waited for without a limit."""

_AT_EXIT = 2.0
"""Seconds of the same where it was not closed and the process ends."""


class Executor(ABC):
    """Runs tasks one after the other, in the order in which they were submitted.

    Reducers over the same process groups share one, so that all ranks issue their collectives in
    one order.
    """

    failure: BaseException | None = None
    """The first error of a task. Ranks may be out of step, so no reducer exchanges after it."""

    @abstractmethod
    def submit(self, task: Task) -> None: ...

    def drain(self, patience: float = _PATIENCE) -> bool:
        """Complete all submitted tasks; False if that takes more than ``patience`` seconds."""
        idle = threading.Event()
        self.submit(idle.set)
        return idle.wait(patience)

    @abstractmethod
    def close(self, patience: float = _PATIENCE) -> bool:
        """As :meth:`drain`; no task may be submitted after it."""


class Worker(Executor):
    """One thread, started by the first task. For CPUs, where a wait for a collective blocks.

    A thread of our own because waiting in a gloo future callback deadlocks. An exit handler ends
    it: a thread that is inside torch when the interpreter stops its threads aborts the process.

    Args:
        device: an accelerator on which its tasks work.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        arguments = self._tasks, device
        self._thread = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
        self._end: finalize[..., Worker] | None = None

    @override
    def submit(self, task: Task) -> None:
        if self._end is None:
            self._thread.start()
            self._end = finalize(self, _end, self._tasks, self._thread)
        self._tasks.put(task)

    @override
    def close(self, patience: float = _PATIENCE) -> bool:
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


class SideStream(Executor):
    """One stream of an accelerator, where waiting only orders streams.

    Args:
        worker: issues the tasks, so that the backward pass goes on launching meanwhile. None: they
            are issued at once, in one order with what the calling thread issues: for models that
            communicate in their backward pass, whose collectives NCCL wants in one order with ours.
    """

    def __init__(self, device: torch.device, worker: Worker | None) -> None:
        self._device, self._module = device, device_module(device)
        # With priority: a mean that arrives is not to wait for the kernels of the backward pass.
        self._stream, self._worker = self._module.Stream(device, priority=-1), worker

    @override
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

    @override
    def drain(self, patience: float = _PATIENCE) -> bool:
        end = time.monotonic() + patience
        if self._worker is not None and not self._worker.drain(patience):
            return False
        over = self._module.Event(enable_timing=False)
        over.record(self._stream)
        while not (ended := over.query()) and time.monotonic() < end:
            time.sleep(_POLL)
        return ended

    @override
    def close(self, patience: float = _PATIENCE) -> bool:
        over, self._worker = self.drain(patience), None  # which may be that of others too
        return over


_workers: WeakValueDictionary[torch.device, Worker] = WeakValueDictionary()


def executor_for(device: torch.device, *, in_order: bool = False) -> Executor:
    """One for the reducers of a model on ``device``.

    On an accelerator those of several models have one thread: NCCL wants collectives in one order
    on all ranks, also those of different groups. Each has a stream of its own.

    Args:
        in_order: issue collectives from the thread that hands tensors over; on accelerators.
    """
    name = "lightning_dist reducer"
    if not is_accelerator(device):
        return Worker(name)
    if in_order:
        return SideStream(device, None)
    worker = _workers.get(device)
    if worker is None:
        worker = _workers[device] = Worker(name, device)
    return SideStream(device, worker)
