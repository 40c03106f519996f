"""Interface of observers of a reducer, which itself uses no clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dist.exchange.channel import Watch
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.plan.plans import Handle
from lightning_dist.reducer.units.base import CodecGroup

Phase = Literal["encode", "decode"]


@dataclass(frozen=True)
class EncodedBucket:
    """The parts of a bucket of which a codec loses something. They are encoded."""

    bucket: int
    groups: Sequence[CodecGroup]
    scale: Tensor

    @property
    def numel(self) -> int:
        """Elements of it that are compressed."""
        return sum(part.numel for group in self.groups for part in group.slices)

    def samples(self, sampler: Sampler) -> Iterator[CodecSample]:
        """Of the elements that ``sampler`` draws. Only while the observer is told of the bucket."""
        for group in self.groups:
            for unit in group.units:
                yield from unit.samples(sampler, self.scale)


class Observer(Watch):
    """Is told when things begin and end. Must be quick, and must not wait for anything.

    :meth:`ready` comes from the backward pass; all else from the thread or stream of the reducer.
    """

    done = False
    """Whether it has seen enough; it is told nothing more then."""

    def ready(self, bucket: int) -> None:
        """All gradients of a bucket are there."""

    def works(self, bucket: int, phase: Phase) -> Callable[[], None]:
        """The reducer begins to compute for a bucket; what is returned is called after that."""
        return _nothing

    def encoded(self, bucket: EncodedBucket) -> Callable[[], None] | None:
        """A bucket of which something is lost is encoded.

        Samples are taken here; what is returned is called when the step is finished.
        """
        return None

    def finished(self, buckets: Sequence[tuple[int, Sequence[CodecGroup]]]) -> None:
        """The mean of all gradients of a step is there, and bytes are known."""

    def regrouped(self, generation: int, *, step: int, reason: str) -> None:
        """Ranks were lost or have joined, and ``step`` comes next; from the training's thread."""

    @override
    def launches(self, op: str, *, group: str, sent: int) -> Callable[[dist.Work], None] | None:
        return None

    @override
    def waits(self) -> Callable[[], None]:
        return _nothing


@contextmanager
def working(observers: Sequence[Observer], bucket: int, phase: Phase) -> Iterator[None]:
    """While the reducer computes for a bucket."""
    with ExitStack() as stack:
        for observer in observers:
            stack.callback(observer.works(bucket, phase))
        yield


def show_encoded(
    observers: Sequence[Observer], handle: Handle, scale: Tensor
) -> list[Callable[[], None]]:
    """Tell ``observers`` of what a codec loses something of; what is to be called in the end."""
    groups = [group for group in handle.groups if not group.codec.lossless]
    if not groups:
        return []
    bucket = EncodedBucket(handle.key, groups, scale)
    calls = [observer.encoded(bucket) for observer in observers]
    return [call for call in calls if call is not None]


def _nothing() -> None:
    pass
