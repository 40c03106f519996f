"""Bytes that a reducer counts, and observers of its events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias
from weakref import WeakMethod

import torch
from torch import Tensor

from lightning_dist.base.versions import versions
from lightning_dist.ranks import Topology
from lightning_dist.ranks.channel import Watch, nothing
from lightning_dist.ranks.traffic import Sent
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.planner import Handle
from lightning_dist.reducer.units.base import CodecGroup, CommUnit
from lightning_dist.settings.exchange import ExchangeSettings

Phase = Literal["encode", "decode"]
Samples: TypeAlias = Callable[[Sampler], Iterator[CodecSample]]
"""Samples of the elements that a sampler draws."""


class Observer(Watch):
    """Receives the start and the end of activities. Must be quick, and must not wait.

    :meth:`ready` is called in the backward pass; all else on the thread or stream of the reducer.
    """

    done = False
    """Whether it needs no more events."""

    def ready(self, bucket: int) -> None:
        """All gradients of a bucket are there."""

    def works(self, bucket: int, phase: Phase) -> Callable[[], None]:
        """The reducer begins to compute for a bucket; what is returned is called after that."""
        return nothing

    def encodes(self, bucket: int, samples: Samples, *, numel: int, scale: Tensor) -> None:
        """Part of a bucket is encoded next, with a loss; ``samples`` may be taken here only.

        Args:
            numel: elements of the whole bucket that are encoded with a loss.
        """

    def finished(self, buckets: Sequence[tuple[int, Sequence[CodecGroup]]]) -> None:
        """The mean of all gradients of a step is there, and bytes are known."""

    def regrouped(self, generation: int, *, step: int, reason: str) -> None:
        """Ranks were lost or have joined, and ``step`` comes next; from the training's thread."""


@contextmanager
def working(observers: Sequence[Observer], bucket: int, phase: Phase) -> Iterator[None]:
    """Context in which the reducer computes for a bucket."""
    with ExitStack() as stack:
        for observer in tuple(observers):  # another thread may change them
            stack.callback(observer.works(bucket, phase))
        yield


def show_encoding(
    observers: Sequence[Observer], handle: Handle, unit: CommUnit, scale: Tensor, *, step: int
) -> None:
    """Show ``observers`` what ``unit`` is about to encode."""
    if unit.samples is None or not observers:
        return
    lossy = [group for group in handle.groups if not group.codec.lossless]
    numel = sum(part.numel for group in lossy for part in group.slices)
    samples = partial(unit.samples, scale=scale, step=step)
    for observer in tuple(observers):
        observer.encodes(handle.key, samples, numel=numel, scale=scale)


def untraced(hook: Callable[..., None]) -> Any:
    """``hook``, a method, kept out of the graphs of torch.compile; as long as its object lives."""
    weak = WeakMethod(hook)  # torch keeps a hook for the life of the process

    def call(*arguments: Any) -> None:
        if (method := weak()) is not None:
            method(*arguments)

    return torch.compiler.disable(call)  # type: ignore[no-untyped-call]


@dataclass
class Count:
    """Bytes this rank sent, and what DDP itself would have sent for the same gradients."""

    raw: int = 0
    sent: Sent = field(default_factory=Sent)

    def add(self, raw: int, sent: Sent) -> None:
        self.raw += raw
        self.sent += sent

    def as_dict(self) -> dict[str, float]:
        wire = self.sent.total
        return {
            "raw_bytes": self.raw,
            "wire_bytes": wire,
            "intra_bytes": self.sent.intra,
            "inter_bytes": self.sent.inter,
            "ratio": self.raw / wire if wire else 1.0,
        }


class CommStats:
    """Totals, the last synchronised step, and both per codec."""

    def __init__(self) -> None:
        self.steps = 0
        self._total, self._last = Count(), Count()
        self._by_codec: dict[str, Count] = {}
        self._running: dict[str, Count] = {}

    def record(self, codec: str, raw: int, sent: Sent) -> None:
        self._running.setdefault(codec, Count()).add(raw, sent)

    def record_outside(self, codec: str, raw: int, sent: Sent) -> None:
        """Count in the totals alone what belongs to no step."""
        for count in (self._total, self._by_codec.setdefault(codec, Count())):
            count.add(raw, sent)

    def end_step(self) -> None:
        self.steps += 1
        self._last, running = Count(), self._running
        for codec, step in running.items():
            self._last.add(step.raw, step.sent)
            self.record_outside(codec, step.raw, step.sent)
        self._running = {}

    def drop_step(self) -> None:
        """Forget what a step that failed had recorded."""
        self._running = {}

    def as_mapping(self) -> Mapping[str, Any]:
        return {
            **self._total.as_dict(),
            "steps": self.steps,
            "last_step": self._last.as_dict(),
            "per_codec": {codec: count.as_dict() for codec, count in self._by_codec.items()},
        }


def run_config(settings: ExchangeSettings, network: Network | None) -> dict[str, Any]:
    """Codec, exchange, groups and versions of a run: plain values, the same on all ranks.

    Args:
        network: None where it is not known yet; nothing is said of the ranks then.
    """
    return {
        "codec": str(settings.inter),
        "codec_inside_node": str(settings.intra),
        "error_feedback": settings.error_feedback,
        "min_compress_numel": settings.min_compress_numel,
        "start_step": settings.start_step,
        "state_update": settings.state_update,
        "delay": settings.delay,
        **({} if network is None else {"exchange": _exchange(network)}),
        **({} if network is None else places(network.topology)),
        "versions": versions(),
    }


def places(topology: Topology) -> dict[str, Any]:
    """Nodes and ranks, as values of a configuration."""
    return {
        "topology": topology.describe(),
        "nodes": len(topology.by_node()),
        "world_size": topology.world_size,
    }


def _exchange(network: Network) -> str:
    if network.intra is None:
        return "flat"
    return "leader" if network.intra.level.owners == 1 else "hierarchical"
