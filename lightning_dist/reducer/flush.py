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
from lightning_dist.reducer.chunk import Lane
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.policy import Slot
from lightning_dist.reducer.state import ReducerState


def owed(
    codec: Codec, slots: Sequence[Slot], state: ReducerState, network: Network
) -> dict[str, float]:
    """Weight of this rank's part of each residual that ``codec`` does not keep, by parameter.

    Equal on all ranks. A gradient is averaged over ranks, a residual over rows of ranks. Momentum
    that ``codec`` still applies multiplies what was a sum of momenta already.
    """
    weight = network.world_size / network.rows.count
    return {
        slot.name: weight * (1 - codec.momentum_correction * (slot.name in state.momenta))
        for slot in slots
        if slot.name in state.residuals
    }


def add_owed(
    lane: Lane, bucket: Tensor, state: ReducerState, network: Network, scale: Tensor
) -> None:
    """``lane``'s gradients in ``bucket``, which carry ``scale``, plus what is owed."""
    for slot in lane.slots if lane.owed else ():
        weight = lane.owed.get(slot.name)
        if weight is None:
            continue
        for start, part in state.residuals.of_row(slot.name, network.rows):
            gradient = slot.of(bucket)[start : start + len(part)]
            part = part.to(bucket.device)
            gradient.copy_(torch.add(gradient, part * scale, alpha=weight))


def free_owed(lane: Lane, state: ReducerState, name: str) -> None:
    """Forget the residual of ``name`` if ``lane`` has sent it and an optimizer applies it."""
    if lane.owed.pop(name, None) is not None:
        state.residuals.drop(name)


def pay_owed(lane: Lane, bucket: Tensor, state: ReducerState) -> None:
    """Forget what ``lane`` has sent, of parameters whose mean in ``bucket`` is finite.

    All ranks have the same mean, so they agree. Waits for a GPU, in the one step in which something
    is owed.
    """
    for slot in lane.slots if lane.owed else ():
        if slot.name in lane.owed and bool(slot.of(bucket).isfinite().all()):
            free_owed(lane, state, slot.name)
