"""A GPU whose time is planted: streams that are busy as long as a test says, and CUDA's events.

There is none on the machines that run the tests. It is a clock with a queue for every stream, in
the place of what ``torch.cuda`` has; what real devices do beyond that is not tested by it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

MS = 1_000_000


@dataclass(eq=False)
class Stream:
    """Work is done one after the other; ``until``: what it was given is done then."""

    until: float = 0.0


@dataclass
class Gpu:
    """Its clock and the host's show nanoseconds, and go at different rates.

    Args:
        rate: of its clock, in nanoseconds per nanosecond of the host.
        fails: whether its driver reports an error from now on.
    """

    rate: float = 1.0
    host: float = 5_000.0 * MS
    fails: bool = False
    synchronised: int = 0
    main: Stream = field(default_factory=Stream)
    streams: list[Stream] = field(default_factory=list)
    _here: threading.local = field(default_factory=threading.local)

    @property
    def now(self) -> float:
        return 77.0 * MS + self.rate * self.host

    def clock(self) -> int:
        """Of the host; looking takes a microsecond."""
        self.host += 1000
        return round(self.host)

    def sleep(self, milliseconds: float) -> None:
        """Of the host."""
        self.host += milliseconds * MS

    def work(self, milliseconds: float, stream: Stream | None = None) -> None:
        """The host asks a stream for work of so long, and goes on."""
        stream = stream or self.main
        stream.until = max(stream.until, self.now) + milliseconds * MS

    @property
    def current(self) -> Stream:
        return getattr(self._here, "stream", self.main)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current, stream
        yield
        self._here.stream = before

    def new_stream(self, device: torch.device, *, priority: int) -> Stream:
        assert priority < 0, "those of usual priority are also of callbacks"
        self.streams.append(Stream())
        return self.streams[-1]

    def synchronize(self, device: torch.device) -> None:
        self.synchronised += 1
        self.host = max(self.host, (self.main.until - 77.0 * MS) / self.rate)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """In the place of ``torch.cuda``."""
        gpu = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Stream) -> None:
                self.at = max(stream.until, gpu.now)

            def query(self) -> bool:
                gpu.clock()  # who asks until it is past does not ask for ever
                if gpu.fails:
                    raise RuntimeError("CUDA error: device-side assert triggered\nmore lines")
                return self.at <= gpu.now

            def elapsed_time(self, end: Any) -> float:
                assert self.query(), "not over"
                assert end.query(), "not over"
                return float(np.float32((end.at - self.at) / 1e6))

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", gpu.new_stream)
        patch.setattr(torch.cuda, "stream", gpu.on)
        patch.setattr(torch.cuda, "current_stream", lambda device: gpu.current)
        patch.setattr(torch.cuda, "synchronize", gpu.synchronize)


class Collective:
    """Of NCCL: a stream of its own waits for the caller's, and then it takes so long.

    Args:
        held_up: milliseconds by which what waits for its future is later.
    """

    def __init__(self, gpu: Gpu, milliseconds: float, *, held_up: float = 0) -> None:
        self._held_up = held_up * MS
        self._gpu, self._stream = gpu, Stream(until=gpu.current.until)
        gpu.work(milliseconds, self._stream)

    def wait(self) -> None:
        """The caller's stream does."""
        self._gpu.current.until = max(self._gpu.current.until, self._stream.until)

    def get_future(self) -> Waiting:
        return Waiting(self._gpu, self._stream.until + self._held_up)


@dataclass(frozen=True)
class Waiting:
    """The future of a collective, which NCCL completes at the launch."""

    gpu: Gpu
    until: float

    def wait(self) -> None:
        """The caller's stream does, and not the host."""
        self.gpu.current.until = max(self.gpu.current.until, self.until)
