"""Changes of local gradients before compression, in place in the bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.units.base import CodecGroup


class Adjustment(Protocol):
    """Changes the local gradients of ``slices`` in the flat ``bucket``, which carries ``scale``.

    While it is not ``active`` nothing is changed and nothing is compressed.
    """

    @property
    def active(self) -> bool: ...

    def __call__(self, slices: Sequence[ParameterSlice], bucket: Tensor, scale: Tensor) -> None: ...


def clip_group(group: CodecGroup, bucket: Tensor, scale: Tensor, *, world_size: int) -> None:
    """DGC's local clipping: every tensor to a norm of ``clip / sqrt(W)``.

    So that the sum of the ranks' gradients has the norm ``clip`` if they are independent. Per
    tensor, since a bucket knows nothing of the others; a norm that is not finite stays so.
    """
    clip = group.codec.local_clip
    if not clip:
        return
    for part in group.slices:
        gradient = part.of(bucket)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)  # no square overflows
        most = scale * (clip * world_size**-0.5)
        gradient.mul_((most / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0))
