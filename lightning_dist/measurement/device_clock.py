"""Clocks of devices: a CPU knows a time at once, an accelerator when its stream comes there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import torch

from lightning_dist.accelerator import DeviceEvent, DeviceStream, device_module, has_streams

_COMPARING = 50_000
"""Nanoseconds that a comparison of clocks may take of a step."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """The host's monotonic clock was ``at`` nanoseconds when the accelerator came to ``event``."""

    at: int
    event: DeviceEvent


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """In a stream. ``anchor`` was the newest one when it was set."""

    event: DeviceEvent
    anchor: Anchor


Timestamp: TypeAlias = int | Mark
"""Nanoseconds, or what will be some. Those of one source may be compared for being the same."""


class DeviceClock(Protocol):
    """A clock of the thread or the stream that does the work."""

    def now(self) -> Timestamp:
        """On an accelerator: when it has come to this place in the stream of the caller."""

    def are_past(self, timestamps: Iterable[Timestamp]) -> bool:
        """Whether all of them have been. Waits for none."""

    def read(self, timestamps: Sequence[Timestamp], *, since: Timestamp) -> Sequence[int]:
        """Nanoseconds of the host's monotonic clock, of timestamps that are past.

        Args:
            since: not after any of them. What is read since the same timestamp fits together.
        """

    def compare(self) -> None:
        """Clocks drift: compare them again, where that takes next to no time."""


class HostClock:
    """Clock of the host, whose timestamps are past at once.

    Args:
        clock: in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.now = clock

    def are_past(self, timestamps: Iterable[Timestamp]) -> bool:
        return True

    def read(self, timestamps: Sequence[Timestamp], *, since: Timestamp) -> Sequence[int]:
        return cast(Sequence[int], timestamps)

    def compare(self) -> None:
        pass


class StreamClock:
    """Events of an accelerator. Nothing is synchronised for them, besides once here.

    What an event costs a stream is about a microsecond. Events tell only how far they are from each
    other; where they are on the host's clock comes from events in a stream of its own, which has
    nothing else to do: they are over while the host looks.

    Args:
        device: of the streams.
        clock: of the host, in nanoseconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._device, self._clock = device, clock
        self._module = device_module(device)
        self._idle = self.new_stream()
        self._module.synchronize(device)
        self._anchor = self._anchored(wait=True)

    def new_stream(self) -> DeviceStream:
        """One that nobody else has: torch runs callbacks of futures in those of usual priority."""
        return self._module.Stream(self._device, priority=-1)

    def on(self, stream: DeviceStream) -> AbstractContextManager[None]:
        """Context in which this stream is the caller's current one."""
        return self._module.stream(stream)

    def hold(self, cycles: int) -> None:
        """Keep the caller's stream busy for so long, where the accelerator can be asked to."""
        sleep = getattr(self._module, "_sleep", None)  # of CUDA alone
        if sleep is not None:
            sleep(cycles)

    def now(self) -> Timestamp:
        return Mark(self._event(self._module.current_stream(self._device)), self._anchor)

    def are_past(self, timestamps: Iterable[Timestamp]) -> bool:
        return all(_has_been(_mark(each).event) for each in timestamps)

    def read(self, timestamps: Sequence[Timestamp], *, since: Timestamp) -> Sequence[int]:
        first = _mark(since)
        # CUDA tells a float32 of milliseconds: an hour after the anchor its steps are a quarter of
        # one. So an old anchor says only where all of them are.
        anchor = first.anchor
        begin = anchor.at + round(anchor.event.elapsed_time(first.event) * 1e6)
        return [
            begin + round(first.event.elapsed_time(_mark(each).event) * 1e6) for each in timestamps
        ]

    def compare(self) -> None:
        self._anchor = self._anchored(wait=False)

    def _anchored(self, *, wait: bool) -> Anchor:
        """Where the accelerator has no time for it at once, the old one stays."""
        begin = self._clock()
        event = self._event(self._idle)
        while not _has_been(event):
            if not wait and self._clock() - begin > _COMPARING:
                return self._anchor
        # It was somewhere in between; a comparison that took long is as wrong as it was long.
        return Anchor((begin + self._clock()) // 2, event)

    def _event(self, stream: DeviceStream) -> DeviceEvent:
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event


def clock_of(device: torch.device) -> DeviceClock:
    """A clock for work on ``device``."""
    return StreamClock(device) if has_streams(device) else HostClock()


def _has_been(event: DeviceEvent) -> bool:
    return event.query()


def _mark(timestamp: Timestamp) -> Mark:
    assert isinstance(timestamp, Mark)
    return timestamp
