"""Changes of local gradients before compression, in place in the bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec
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


# Residuals of parameters whose codec no longer keeps any. After a schedule has moved from `int8` to
# `bf16`, say, nothing would ever send the residuals of the first phase. They are added to the
# gradients of one synchronised step, the first that is finite on every rank, travel with them under
# the new codec, and are freed.


def owed(
    codec: Codec, slices: Sequence[ParameterSlice], state: ReducerState, network: Network
) -> dict[str, float]:
    """Weight of this rank's part of each residual that ``codec`` does not keep, by parameter.

    Equal on all ranks. A gradient is averaged over ranks, a residual over rows of ranks. Momentum
    that ``codec`` still applies multiplies what was a sum of momenta already.
    """
    weight = network.world_size / network.rows.count
    return {
        part.name: weight * (1 - codec.momentum_correction * (state.has("momentum", part.name)))
        for part in slices
        if state.has("residual", part.name)
    }


def add_owed(
    group: CodecGroup,
    bucket: Tensor,
    state: ReducerState,
    network: Network,
    scale: Tensor,
    *,
    sharded: bool,
) -> None:
    """``group``'s gradients in ``bucket``, which carry ``scale``, plus what is owed.

    Args:
        sharded: every rank has shards of its own in ``bucket``, and owes what belongs to them.
    """
    for part in [part for part in group.slices if part.name in group.owed]:
        dtype = compute_dtype(bucket.dtype)
        for start, kept in (
            [(0, state.per_rank("residual", part, dtype=dtype, device=bucket.device))]
            if sharded
            else state.of_row("residual", part.name, network.rows)
        ):
            gradient = part.of(bucket)[start : start + len(kept)]
            kept = kept.to(bucket.device)
            gradient.copy_(torch.add(gradient, kept * scale, alpha=group.owed[part.name]))


def free_owed(group: CodecGroup, state: ReducerState, name: str) -> None:
    """Forget the residual of ``name`` if ``group`` has sent it and an optimizer applies it."""
    if group.owed.pop(name, None) is not None:
        state.drop("residual", name)
