"""Bytes that a step will send, and the time that training waits for them."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dist.base.accelerator import device_module, is_accelerator
from lightning_dist.base.log import get_logger
from lightning_dist.codecs.base import Codec, Shape
from lightning_dist.measurement.microbenchmark import Timestamp, clock_of
from lightning_dist.ranks.traffic import Sent
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import (
    ParameterSlice,
    as_real,
    slices_of,
)
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.stats import Observer
from lightning_dist.reducer.units.base import CodecGroup
from lightning_dist.settings.exchange import ExchangeSettings

log = get_logger(__name__)


_META = torch.device("meta")
_LARGE = 1 << 16
"""Elements from which on parameters are planned once for all of the same shape."""
_ENOUGH = 1 << 22
"""Elements of which the bytes of more follow: padding is next to nothing there."""


@dataclass(frozen=True)
class Expected:
    """Bytes of this rank in a step of the policy's last stage.

    ``sent`` is None where a codec sends as much as the gradients make it (``threshold``). ``raw``
    is what plain DDP would send. ``since``: the synchronised step from which on it holds.
    """

    raw: int
    sent: Sent | None
    since: int


def first_compressed_step(policy: Codec, shapes: Mapping[str, Shape]) -> int | None:
    """The first synchronised step at which ``policy`` compresses a parameter; None: it never does.

    Args:
        shapes: of the trained parameters, by name.
    """
    for step in policy.boundaries():
        if any(not policy.for_tensor(n, s, step=step).lossless for n, s in shapes.items()):
            return step
    return None


def expected_traffic(
    names: Mapping[Tensor, str], settings: ExchangeSettings, network: Network
) -> Expected:
    """Traffic that :class:`~lightning_dist.reducer.reducer.Reducer` will count. Not collective.

    DDP's buckets are not known yet, so padding at their ends is left out.
    """
    policy = settings.policy
    since = policy.boundaries()[-1]
    trained = {name: p for p, name in names.items() if p.requires_grad}
    planner = Planner(
        _without_memory(network, network.device),
        ReducerState(),
        settings,
        {name: tuple(p.shape) for name, p in trained.items()},
    )
    raw, intra, inter, known = 0.0, 0.0, 0.0, True
    for codec, slices, dtype, times in _alike(trained, policy, step=since, planner=planner):
        bucket = torch.empty(slices[-1].offset + slices[-1].numel, dtype=dtype, device=_META)
        (group,) = planner.groups({codec: slices}, bucket)
        raw += times * group.raw_bytes
        intra, inter = intra + times * group.sent.intra, inter + times * group.sent.inter
        known = known and codec.payload_bytes(slices[0].shape) is not None
    return Expected(round(raw), Sent(round(intra), round(inter)) if known else None, since)


def _alike(
    trained: Mapping[str, Tensor], policy: Codec, *, step: int, planner: Planner
) -> Iterator[tuple[Codec, Sequence[ParameterSlice], torch.dtype, float]]:
    """Parameters to plan together, and how many times their bytes count."""
    small: dict[torch.dtype, list[Tensor]] = {}
    large: dict[tuple[Codec, torch.dtype, Shape], list[str]] = {}
    names = {parameter: name for name, parameter in trained.items()}
    for name, parameter in reversed(list(trained.items())):  # the order of DDP's buckets
        real = as_real(parameter)
        if real.numel() < _LARGE:
            small.setdefault(real.dtype, []).append(parameter)
        else:
            codec = policy.for_tensor(name, tuple(parameter.shape), step=step)
            key = codec, real.dtype, tuple(real.shape)
            large.setdefault(key, []).append(name)
    for dtype, parameters in small.items():
        parts = slices_of([names[parameter] for parameter in parameters], parameters)
        for codec, slices in planner.by_codec(parts, dtype, step=step).items():
            yield codec, slices, dtype, 1
    for (codec, dtype, shape), alike in large.items():
        whole = ParameterSlice(alike[0], 0, shape)
        codec = planner.affordable(codec, whole, dtype)
        enough = not codec.whole_tensors and whole.numel > _ENOUGH
        part = ParameterSlice(alike[0], 0, (_ENOUGH,)) if enough else whole
        yield codec, [part], dtype, len(alike) * whole.numel / part.numel


def _without_memory(network: Network, device: torch.device) -> Network:
    intra = network.intra
    if intra is not None and intra.inter is not None:
        intra = replace(intra, inter=_without_memory(intra.inter, device))
    return replace(network, device=_META, intra=intra, plans_for=device)


_PROBE_BYTES = 1 << 20
_STEPS = 20
_MOST_PENDING = 64
"""Steps that an accelerator may lag behind."""


def measure_link(network: Network) -> float:
    """Bytes per second that a rank sends during an allreduce of 1 MB, median of 3. Collective."""
    probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=network.device)
    sent = 2 * (network.world_size - 1) / network.world_size * _PROBE_BYTES
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        dist.all_reduce(probe, group=network.data.group)
        if is_accelerator(network.device):
            device_module(network.device).synchronize(network.device)
        seconds.append(time.perf_counter() - start)
    return sent / statistics.median(seconds[1:])  # the first one opens connections


class ExposureWatch(Observer):
    """Compares the exposed communication of the first steps with what plain DDP would expose.

    Exposed is the time from the arrival of the last bucket's gradients to that of the mean on this
    rank. It contains waiting for a late rank, which no codec changes. That of DDP is predicted from
    the measured link: the bytes that do not fit under the backward pass, and at least those of the
    last bucket.
    """

    def __init__(self, network: Network, *, advice_to: bool) -> None:
        self._device_clock = clock_of(network.device)
        self._link = measure_link(network)
        self._advises = advice_to
        self._marks: list[Timestamp] = []  # when the buckets of this step were ready
        self._pending: deque[tuple[list[Timestamp], int, int]] = deque(maxlen=_MOST_PENDING)
        """Marks of steps, with that of the end, and bytes of all buckets and of the last."""
        self._exposed: list[float] = []
        self._expected: list[float] = []

    @override
    def ready(self, bucket: int) -> None:
        self._marks.append(self._device_clock.now())

    @override
    def finished(self, buckets: Sequence[tuple[int, Sequence[CodecGroup]]]) -> None:
        marks, self._marks = self._marks, []
        groups = [group for _, of_bucket in buckets for group in of_bucket]
        if all(group.codec.lossless for group in groups):
            return  # a warm-up says nothing of compression
        marks.append(self._device_clock.now())
        raw = sum(group.raw_bytes for group in groups)
        self._pending.append((marks, raw, sum(group.raw_bytes for group in buckets[-1][1])))
        while self._pending and self._device_clock.are_past(self._pending[0][0]) and not self.done:
            self._measure(*self._pending.popleft())

    def _measure(self, marks: Sequence[Timestamp], raw: int, last: int) -> None:
        first, last_ready, finished = (
            nanoseconds / 1e9
            for nanoseconds in self._device_clock.read([marks[0], *marks[-2:]], since=marks[0])
        )
        backward = last_ready - first
        self._exposed.append(finished - last_ready)
        self._expected.append(max(raw / self._link - backward, last / self._link))
        self.done = len(self._exposed) >= _STEPS
        if self.done:
            self._advise()

    def _advise(self) -> None:
        exposed, expected = statistics.median(self._exposed), statistics.median(self._expected)
        if exposed <= expected or not self._advises:
            return
        log.warning(
            "Compression costs more than it saves here, or ranks wait for one that is late: "
            "exposed communication is %.1f ms a step; estimate for plain DDP: %.1f ms at the %.2f "
            "Gbit/s measured at start-up. CommProfiler() separates codec, transfer and waiting and "
            "names the late rank; if there is none, use codec='none' or plain DDP on this link.",
            exposed * 1e3,
            expected * 1e3,
            self._link * 8 / 1e9,
        )
