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
from lightning_dist.reducer.stats import Samples

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
        self._bucket: int | None = None  # that is being encoded
        self._sampler: Sampler | None = None  # of this bucket, if it is sampled
        self._of = 0
        self._squares: list[Tensor] = []
        self._cost = 0

    def ask(self, step: int | None) -> None:
        """Sample a bucket of ``step``, which comes next; None: no bucket."""
        self._step, self._bucket, self._sampler = step, None, None
        self._seen, self._buckets = 0, self._seen or self._buckets

    def inspect(self, bucket: int, samples: Samples, *, numel: int, scale: Tensor) -> None:
        """Take ``samples`` of ``bucket`` if it is its turn."""
        if bucket != self._bucket:
            self._bucket, self._sampler = bucket, None
            number, self._seen = self._seen, self._seen + 1
            if (
                self._step is not None
                and not self._squares
                and number == self._turn % max(self._buckets, 1)
            ):
                self._turn += 1
                # All ranks draw the same elements.
                self._sampler, self._of = Sampler(self._step, share=MOST / max(numel, 1)), bucket
        if self._sampler is None:
            return
        begin = self._clock()
        for each in samples(self._sampler):
            residual = each.gradient[:0] if each.residual is None else each.residual * scale
            lost = each.compensated - each.sent
            norms = [
                torch.linalg.vector_norm(tensor, dtype=torch.float64)
                for tensor in (each.gradient, each.compensated, each.sent, lost, residual)
            ]
            has = torch.full_like(norms[0], each.residual is not None)
            squares = torch.stack([*norms, has]).square()
            self._squares.append(squares.to("cpu", non_blocking=True))
        self._cost += self._clock() - begin

    def take(self) -> tuple[Sample | None, int]:
        """The sample since the last call, and the nanoseconds that it took."""
        found, cost = None, self._cost
        if self._squares and self._step is not None:
            found = partial(_record, self._step, self._of, self._squares)
        self._squares, self._cost = [], 0
        return found, cost


def _record(step: int, bucket: int, squares: Sequence[Tensor]) -> ErrorRecord | None:
    """From squared norms of gradient, input, payload, error, and residual if there is one.

    In float64, on their way from an accelerator until the step is past there. None: there are no
    elements, only zeros, or an overflow.
    """
    gradient, compensated, sent, lost, residual, has = torch.stack(list(squares)).sum(0).tolist()
    if not compensated or not math.isfinite(gradient + compensated + sent + lost + residual):
        return None
    cosine = ratio = None
    if sent:
        product = (compensated + sent - lost) / 2
        # The products of tiny norms are zero before these are.
        cosine = max(-1.0, min(1.0, product / math.sqrt(compensated) / math.sqrt(sent)))
    if has and gradient:
        ratio = math.sqrt(residual) / math.sqrt(gradient)
    return ErrorRecord(step, bucket, math.sqrt(lost / compensated), cosine, ratio)
