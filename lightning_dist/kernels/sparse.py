"""Passes of the threshold codec over flat tensors, run eagerly."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_dist.codecs.base import Payload
from lightning_dist.codecs.threshold import Threshold
from lightning_dist.kernels.passes import Pass

MOST_PLACES = 1 << 31
"""Elements of a bucket whose places fit int32."""


def select(
    codec: Threshold, compensated: Tensor, residual: Tensor | None, scale: Tensor, offset: int
) -> Payload:
    """Add the residual in place; places in the bucket, int32, and values of what is large then."""
    if residual is not None:
        # Not addcmul_, which rounds once only where the machine can.
        compensated.add_(residual * scale)
    where, values = codec.select(compensated, scale)
    return (where + offset).to(torch.int32), values


def keep(compensated: Tensor, residual: Tensor | None, scale: Tensor) -> None:
    """The rest of ``compensated`` becomes the residual where it is finite, and it zero."""
    if residual is not None:
        left = compensated / scale
        residual.copy_(torch.where(left.isfinite(), left, residual))
    compensated.zero_()


def scatter(compensated: Tensor, payload: Payload, weight: float) -> None:
    """Add ``weight`` times the values of ``payload`` at their places, which are distinct."""
    places, values = payload
    compensated.index_add_(0, places, values.to(compensated.dtype), alpha=weight)


EAGER: Mapping[str, Pass] = {each.__name__: each for each in (select, keep, scatter)}
"""The passes by name."""
