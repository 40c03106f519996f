"""Compression error: sampled now and then, on one bucket at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dist.profiling.capture.events import ErrorRecord
from lightning_dist.reducer.codec_sample import Sampler
from lightning_dist.reducer.observer import EncodedBucket

MOST = 1 << 18
"""Elements that are looked at, in a few milliseconds on a CPU: smaller buckets as a whole."""


Sample: TypeAlias = Callable[[], ErrorRecord | None]
"""The error of a bucket, when its step is past; None where there is nothing to compare."""


class CompressionErrorSampler:
    """Samples the next bucket in turn, in a step that it is asked for; ``clock``: nanoseconds."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._step: int | None = None
        self._turn = 0
        self._seen = self._buckets = 0  # in this step, and in the one before
        self._found: Sample | None = None
        self._cost = 0

    def ask(self, step: int | None) -> None:
        """Sample a bucket of ``step``, which comes next; None: no bucket."""
        self._step = step
        self._seen, self._buckets = 0, self._seen or self._buckets

    def inspect(self, encoded: EncodedBucket) -> Callable[[], None] | None:
        """Sample ``encoded`` if it is its turn; the result is to be called when it is finished."""
        number, self._seen = self._seen, self._seen + 1
        if self._step is None or number != self._turn % max(self._buckets, 1):
            return None
        begin = self._clock()
        step, self._step = self._step, None
        self._turn += 1
        # All ranks draw the same elements.
        sampler = Sampler(step, share=MOST / max(encoded.numel, 1))
        samples = list(encoded.samples(sampler))
        if not samples:
            return None
        gradient = _square([each.gradient for each in samples])
        compensated = _square([each.compensated for each in samples])
        scale = encoded.scale.double()
        self._cost += self._clock() - begin

        def finished() -> None:
            begin = self._clock()
            sent = [each.sent() for each in samples]
            lost = [each.compensated - said for each, said in zip(samples, sent, strict=True)]
            residuals = [each.residual() for each in samples if each.residual is not None]
            owed = [_square(residuals) * scale**2] if residuals else []
            squares = torch.stack([gradient, compensated, _square(sent), _square(lost), *owed])
            values = squares.to("cpu", non_blocking=True)
            self._found = partial(_record, step, encoded.bucket, values)
            self._cost += self._clock() - begin

        return finished

    def take(self) -> tuple[Sample | None, int]:
        """The sample since the last call, and the nanoseconds that it took."""
        found, cost = self._found, self._cost
        self._found, self._cost = None, 0
        return found, cost


def _record(step: int, bucket: int, squares: Tensor) -> ErrorRecord | None:
    """From squared norms of gradient, what is compensated, sent, lost, and owed, if anything is.

    In float64, on their way from an accelerator until the step is past there. None: there are no
    elements, only zeros, or an overflow.
    """
    gradient, compensated, sent, lost, *owed = squares.tolist()
    if not compensated or not math.isfinite(sum((gradient, compensated, sent, lost, *owed))):
        return None
    cosine = ratio = None
    if sent:
        product = (compensated + sent - lost) / 2
        # The products of tiny norms are zero before these are.
        cosine = max(-1.0, min(1.0, product / math.sqrt(compensated) / math.sqrt(sent)))
    if owed and gradient:
        ratio = math.sqrt(owed[0]) / math.sqrt(gradient)
    return ErrorRecord(step, bucket, math.sqrt(lost / compensated), cosine, ratio)


def _square(tensors: Sequence[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors]
    return torch.stack(norms).square().sum()
