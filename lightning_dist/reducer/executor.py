"""Where the reducer's work runs: one ordered queue per reducer, beside the backward pass."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

Task = Callable[[], None]


class Executor(Protocol):
    """Runs tasks one after the other, in the order in which they were submitted."""

    def submit(self, task: Task) -> None: ...

    def close(self) -> None: ...


class Worker:
    """One thread. On CPU, where waiting for a collective blocks whoever waits.

    A thread of our own because waiting in a gloo future callback deadlocks.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._queue.put(task)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=10)  # a worker that waits for a dead peer is left behind

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            with torch.no_grad():
                task()
            del task  # or the last bucket's buffer would live until the next one


class SideStream:
    """One CUDA stream. There waiting only orders streams, so tasks run where they are submitted."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    def submit(self, task: Task) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # The hook runs in the autograd thread, which may have inherited an autocast.
        exact = torch.autocast("cuda", enabled=False)
        with torch.cuda.stream(self._stream), torch.no_grad(), exact:
            task()

    def close(self) -> None:
        self._stream.synchronize()


def executor_for(device: torch.device) -> Executor:
    return SideStream(device) if device.type == "cuda" else Worker("lightning_dist reducer")
