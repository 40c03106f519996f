"""Changes of local gradients before compression, in place in the bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
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


def add_residuals(
    group: CodecGroup,
    bucket: Tensor,
    state: ReducerState,
    network: Network,
    scale: Tensor,
    *,
    sharded: bool,
) -> None:
    """Add residuals that the codec of ``group`` does not keep to the gradients, which carry
    ``scale``: they travel with this step, and are freed when it is committed.

    A gradient is averaged over ranks, a residual over rows of ranks. Momentum that the codec still
    applies multiplies what was a sum of momenta already.

    Args:
        sharded: every rank has shards of its own in ``bucket``, and the residuals of those.
    """
    group.residuals_sent = {p.name for p in group.slices if ("residual", p.name) in state.held}
    dtype, device = compute_dtype(bucket.dtype), bucket.device
    for part in [part for part in group.slices if part.name in group.residuals_sent]:
        has_momentum = ("momentum", part.name) in state.held
        momentum = group.codec.momentum_correction if has_momentum else 0.0
        weight = network.world_size / network.rows.count * (1 - momentum)
        for start, kept in (
            [(0, state.per_rank("residual", part, dtype=dtype, device=device))]
            if sharded
            else state.held["residual", part.name].of_row(first=network.rows.first)
        ):
            gradient = part.of(bucket)[start : start + len(kept)]
            gradient.copy_(torch.add(gradient, kept.to(device) * scale, alpha=weight))
