"""Passes of the threshold codec over flat tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dist.codecs.base import Payload
from lightning_dist.codecs.threshold import Threshold

_INT32_PLACES = 1 << 31


class SparsePasses:
    """Arithmetic on flat tensors: what was owed added, selected, what is owed kept, scattered."""

    def add_residual(self, pending: Tensor, residual: Tensor, scale: Tensor) -> None:
        # Not addcmul_, which rounds once only where the machine can.
        pending.add_(residual * scale)

    def select(
        self, codec: Threshold, pending: Tensor, scale: Tensor, *, offset: int, numel: int
    ) -> Payload:
        """Places in the bucket, which has ``numel`` elements, and values."""
        where, values = codec.select(pending, scale)
        return placed_at(where, offset, numel=numel), values

    def keep(self, pending: Tensor, residual: Tensor | None, scale: Tensor) -> None:
        """What is left of ``pending`` becomes the residual where it is finite, and it zero."""
        if residual is not None:
            left = pending / scale
            residual.copy_(torch.where(left.isfinite(), left, residual))
        pending.zero_()

    def scatter(self, pending: Tensor, payload: Payload, *, weight: float) -> None:
        """Add ``weight`` times the values of ``payload`` at their places, which are distinct."""
        places, values = payload
        pending.index_add_(0, places, values.to(pending.dtype), alpha=weight)


def place_dtype(numel: int) -> torch.dtype:
    """Of places in a bucket of ``numel`` elements, the same on all ranks."""
    return torch.int32 if numel <= _INT32_PLACES else torch.int64


def placed_at(where: Tensor, offset: int, *, numel: int) -> Tensor:
    """Indices in a parameter, int64 -> places in its bucket, which has ``numel`` elements."""
    return (where + offset).to(place_dtype(numel))
