"""Residuals of parameters whose codec no longer keeps any: sent once and freed.

After a schedule has moved from ``int8`` to ``bf16``, say, nothing would ever send the residuals of
the first stage. They are added to the gradients of one synchronised step, the first that is finite
on every rank, and travel with them under the new codec.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.unit import CodecGroup


def owed(
    codec: Codec, slices: Sequence[ParameterSlice], state: ReducerState, network: Network
) -> dict[str, float]:
    """Weight of this rank's part of each residual that ``codec`` does not keep, by parameter.

    Equal on all ranks. A gradient is averaged over ranks, a residual over rows of ranks. Momentum
    that ``codec`` still applies multiplies what was a sum of momenta already.
    """
    weight = network.world_size / network.rows.count
    return {
        part.name: weight * (1 - codec.momentum_correction * (part.name in state.momenta))
        for part in slices
        if part.name in state.residuals
    }


def add_owed(
    group: CodecGroup, bucket: Tensor, state: ReducerState, network: Network, scale: Tensor
) -> None:
    """``group``'s gradients in ``bucket``, which carry ``scale``, plus what is owed."""
    for part in group.slices if group.owed else ():
        weight = group.owed.get(part.name)
        if weight is None:
            continue
        for start, kept in state.residuals.of_row(part.name, network.rows):
            gradient = part.of(bucket)[start : start + len(kept)]
            kept = kept.to(bucket.device)
            gradient.copy_(torch.add(gradient, kept * scale, alpha=weight))


def free_owed(group: CodecGroup, state: ReducerState, name: str) -> None:
    """Forget the residual of ``name`` if ``group`` has sent it and an optimizer applies it."""
    if group.owed.pop(name, None) is not None:
        state.residuals.drop(name)


def pay_owed(group: CodecGroup, bucket: Tensor, state: ReducerState) -> None:
    """Forget what ``group`` has sent, of parameters whose mean in ``bucket`` is finite.

    All ranks have the same mean, so they agree. Waits for a GPU, in the one step in which something
    is owed.
    """
    for part in group.slices if group.owed else ():
        if part.name in group.owed and bool(part.of(bucket).isfinite().all()):
            free_owed(group, state, part.name)
