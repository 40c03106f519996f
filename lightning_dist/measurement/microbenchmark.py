"""Times of device work, and a benchmark of one function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lightning_dist.base.accelerator import DeviceEvent, DeviceStream, device_module, has_streams
from lightning_dist.base.exchanges import EXCHANGES, UNIT_ELEMENTS
from lightning_dist.base.private import hold_stream
from lightning_dist.codecs.base import Codec
from lightning_dist.ranks import Topology
from lightning_dist.ranks.channel import Channel, PendingWork
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.units.base import JoinedUnit
from lightning_dist.settings.exchange import ExchangeSettings

_COMPARING = 50_000
"""Nanoseconds that a comparison of clocks may take of a step."""


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """The host's monotonic clock was ``at`` nanoseconds when the accelerator came to ``event``."""

    at: int
    event: DeviceEvent


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """Event in a stream, and the newest anchor when it was recorded."""

    event: DeviceEvent
    anchor: ClockAnchor


Timestamp: TypeAlias = int | Mark
"""Nanoseconds, or an event that will be read as such."""


class HostClock:
    """Clock of the host, whose timestamps are times; methods as of :class:`StreamClock`.

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
    """Clock of events of an accelerator, which is synchronised only once, here.

    An event takes a stream about a microsecond. Events have a time relative to each other only;
    their time on the host's clock comes from events in an idle stream, which complete while the
    host looks.

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
        """An unused stream: torch runs callbacks of futures in those of usual priority."""
        return self._module.Stream(self._device, priority=-1)

    def on(self, stream: DeviceStream) -> AbstractContextManager[None]:
        """Context in which ``stream`` is the caller's current stream."""
        return self._module.stream(stream)

    def hold(self, cycles: int) -> None:
        """Keep the caller's stream busy for so many cycles, on CUDA only."""
        hold_stream(self._module, cycles=cycles)

    def now(self) -> Timestamp:
        """The time at which the caller's stream gets here."""
        return Mark(self._event(self._module.current_stream(self._device)), self._anchor)

    def are_past(self, timestamps: Iterable[Timestamp]) -> bool:
        """True if all have been reached. Does not wait."""
        return all(_mark(timestamp).event.query() for timestamp in timestamps)

    def read(self, timestamps: Sequence[Timestamp], *, since: Timestamp) -> Sequence[int]:
        """Nanoseconds of the host's monotonic clock, of timestamps that are past.

        Args:
            since: not after any of them. Results with the same ``since`` are consistent.
        """
        first = _mark(since)
        # CUDA tells a float32 of milliseconds: an hour after the anchor its steps are a quarter of
        # one. So an old anchor says only where all of them are.
        anchor = first.anchor
        begin = anchor.at + round(anchor.event.elapsed_time(first.event) * 1e6)
        passed = (first.event.elapsed_time(_mark(timestamp).event) for timestamp in timestamps)
        return [begin + round(milliseconds * 1e6) for milliseconds in passed]

    def compare(self) -> None:
        """Correct the drift between the clocks, if that takes next to no time."""
        self._anchor = self._anchored(wait=False)

    def _anchored(self, *, wait: bool) -> ClockAnchor:
        """Where the accelerator has no time for it at once, the old one stays."""
        begin = self._clock()
        event = self._event(self._idle)
        while not event.query():
            if not wait and self._clock() - begin > _COMPARING:
                return self._anchor
        # It was somewhere in between; a comparison that took long is as wrong as it was long.
        return ClockAnchor((begin + self._clock()) // 2, event)

    def _event(self, stream: DeviceStream) -> DeviceEvent:
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event


DeviceClock: TypeAlias = HostClock | StreamClock
"""A clock of the thread or the stream that does the work."""


def clock_of(device: torch.device) -> DeviceClock:
    """A clock for work on ``device``."""
    return StreamClock(device) if has_streams(device) else HostClock()


def _mark(timestamp: Timestamp) -> Mark:
    assert isinstance(timestamp, Mark)
    return timestamp


WIDTH = 1024
"""Rows and columns of the gradients, which are matrices."""


class CodecWork:
    """The work of one rank on the gradients of matrices, before and after the exchange.

    Nothing is sent: every payload that is received is a copy of the rank's own.

    Args:
        feedback: keep the residual of error feedback.
        fused: use the kernels that training uses: compiled ones on a CPU, Triton's on a GPU.
        units: of a megabyte of gradient.
        ranks: of the exchange. A rank decodes one payload for each, or their sum.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        feedback: bool,
        fused: bool,
        device: torch.device,
        units: int,
        ranks: Literal[1, 2] = 2,
    ) -> None:
        self.numel = units * UNIT_ELEMENTS
        self.bucket = torch.zeros(self.numel, device=device)
        matrices = max(self.numel // WIDTH**2, 1)
        rows = self.numel // WIDTH // matrices
        slices = [ParameterSlice(f"{i}", i * rows * WIDTH, (rows, WIDTH)) for i in range(matrices)]
        channel = Copies(ranks)
        planner = Planner(
            Network(channel, channel, Topology(("host",) * ranks, 0), device),
            ReducerState(),
            ExchangeSettings(error_feedback=feedback, compile_kernels=fused),
            immediate=True,
        )
        if fused:
            planner.fuse(codec, [self.bucket.dtype], sizes=[rows * WIDTH])
        (group,) = planner.groups({codec: slices}, self.bucket)
        self.units = group.units
        on_tables = any(isinstance(unit, JoinedUnit) for unit in self.units)
        self.is_fused = planner.is_fused or on_tables
        self.scale = torch.ones((), device=device)
        self.step = 0
        wire = (codec.payload_bytes((WIDTH, WIDTH)) or 0) / WIDTH**2
        kept = 2 * 4 * len(planner.kinds(codec))  # read and written
        received = 1 if EXCHANGES[codec.exchange].linear else ranks
        self.bytes_per_element = {
            "encode": 4 + wire + kept,
            # Block codecs write their state when they encode.
            "decode": 4 + wire * received + (0 if codec.block else kept),
        }
        """Bytes that each pass must read and write at least."""

    def prepare(self) -> None:
        """Draw gradients for the next step."""
        self.step += 1
        self.bucket.normal_()

    def encode(self) -> None:
        for unit in self.units:
            unit.encode(self.scale, step=self.step)

    def exchange(self) -> None:
        for unit in self.units:
            unit.start()

    def decode(self) -> None:
        for unit in self.units:
            unit.start_second()
            unit.decode_and_commit(self.scale)


_OVER: Future[None] = Future()
"""Work that has completed."""
_OVER.set_result(None)


class Copies(Channel):
    """A channel whose ranks all send the same.

    Args:
        ranks: of the channel, of which this is the first.
        group: of this process alone, for what is not sent over channels.
    """

    def __init__(self, ranks: int, group: Any = None) -> None:
        super().__init__(group)
        self._ranks = ranks

    @override
    def all_reduce(
        self, tensor: Tensor, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> PendingWork:
        return _OVER

    @override
    def all_gather(self, output: Tensor, own: Tensor) -> PendingWork:
        for part in output.chunk(self._ranks):
            part.copy_(own)
        return _OVER

    @override
    def all_to_all(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: Sequence[int] | None = None,
        own_sizes: Sequence[int] | None = None,
    ) -> PendingWork:
        parts = torch.split(own, list(own_sizes)) if own_sizes else own.chunk(self._ranks)
        sizes = output_sizes or [len(output) // self._ranks] * self._ranks
        for part in torch.split(output, list(sizes)):
            part.copy_(parts[0])
        return _OVER
