"""Interface of observers of a reducer, which itself reads no clock; and hooks on models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias
from weakref import WeakMethod

import torch
from torch import Tensor

from lightning_dist.ranks.channel import Watch, nothing
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.plan.plans import Handle
from lightning_dist.reducer.units.base import CodecGroup, CommUnit

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
    """While the reducer computes for a bucket."""
    with ExitStack() as stack:
        for observer in tuple(observers):  # another thread may change them
            stack.callback(observer.works(bucket, phase))
        yield


def show_encoding(
    observers: Sequence[Observer], handle: Handle, unit: CommUnit, scale: Tensor, *, step: int
) -> None:
    """Show ``observers`` what ``unit`` is about to encode."""
    if unit.source is None or not observers:
        return
    lossy = [group for group in handle.groups if not group.codec.lossless]
    numel = sum(part.numel for group in lossy for part in group.slices)
    samples = partial(unit.source.samples, scale=scale, step=step)
    for observer in tuple(observers):
        observer.encodes(handle.key, samples, numel=numel, scale=scale)


def untraced(hook: Callable[..., None]) -> Any:
    """``hook``, a method, kept out of the graphs of torch.compile; as long as its object lives."""
    weak = WeakMethod(hook)  # torch keeps a hook for the life of the process

    def call(*arguments: Any) -> None:
        if (method := weak()) is not None:
            method(*arguments)

    return torch.compiler.disable(call)  # type: ignore[no-untyped-call]
