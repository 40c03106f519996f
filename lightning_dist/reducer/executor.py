"""Where reducers' work runs: one ordered queue, beside the backward pass."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from weakref import finalize

import torch
from typing_extensions import override

from lightning_dist.accelerator import device_module, is_accelerator

Task = Callable[[], None]
Tasks = queue.SimpleQueue[Task | None]

_PATIENCE = 10.0
"""Seconds for a worker that is closed; one that nothing can stop is left behind."""

_POLL = 0.001
"""Seconds between two looks at an accelerator, which can only be waited for without a limit."""

_AT_EXIT = 2.0
"""Seconds of the same where nobody has closed it and the process ends."""


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
        """Do what is left; False: it is still at it after ``patience`` seconds."""
        idle = threading.Event()
        self.submit(idle.set)
        return idle.wait(patience)

    @abstractmethod
    def close(self, patience: float = _PATIENCE) -> bool:
        """As :meth:`drain`, and end."""


class Worker(Executor):
    """One thread, from the first task on. On CPU, where waiting for a collective blocks who waits.

    A thread of our own because waiting in a gloo future callback deadlocks. It ends with the
    interpreter at the latest, before that does: the training goes on as soon as it has its
    gradients, and a thread that is still in torch when Python stops its threads aborts the process.
    """

    def __init__(self, name: str) -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
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


def _work(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        with torch.no_grad():
            task()
        del task  # or the last bucket's buffer would live until the next one


def _end(tasks: Tasks, thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():  # which may drop the last reference to its reducer
        thread.join(_AT_EXIT)


class SideStream(Executor):
    """One stream of an accelerator. Waiting only orders streams, so tasks run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, device_module(device)
        self._stream = self._module.Stream(device)

    @override
    def submit(self, task: Task) -> None:
        self._stream.wait_stream(self._module.current_stream(self._device))
        # The hook runs in the autograd thread, which may have inherited an autocast.
        exact = torch.autocast(self._device.type, enabled=False)
        with self._module.stream(self._stream), torch.no_grad(), exact:
            task()

    @override
    def drain(self, patience: float = _PATIENCE) -> bool:
        over = self._module.Event(enable_timing=False)
        over.record(self._stream)
        end = time.monotonic() + patience
        while not (ended := over.query()) and time.monotonic() < end:
            time.sleep(_POLL)
        return ended

    @override
    def close(self, patience: float = _PATIENCE) -> bool:
        return self.drain(patience)


def executor_for(device: torch.device) -> Executor:
    return SideStream(device) if is_accelerator(device) else Worker("lightning_dist reducer")
