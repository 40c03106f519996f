"""Buffers of a model that is trained in local steps: running statistics are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.exchange.replicate import bits_digest
from lightning_dist.reducer.network import Network


@torch.no_grad()
def average_buffers(buffers: Sequence[Tensor], network: Network, *, share: float) -> None:
    """Give every worker the mean of each buffer in which workers differ. Collective.

    The mean is over the workers whose own buffer is finite, in float64 if the buffer is and else in
    float32. A buffer that is equal on all workers is not sent and keeps its bits; integers stay the
    worker's own.

    Args:
        buffers: in an order that is equal on all workers.
        share: of a worker that this rank is.
    """
    floating = [each for each in buffers if each.is_floating_point() and each.numel()]
    differ = _differ(floating, network) if floating else []
    for dtype in (torch.float32, torch.float64):
        wide = dtype == torch.float64
        some = [buffer for buffer in differ if (buffer.dtype == torch.float64) == wide]
        if some:
            _average(some, network, dtype=dtype, share=share)


def _differ(buffers: Sequence[Tensor], network: Network) -> list[Tensor]:
    """Buffers that are not the same bits on all workers."""
    digests = torch.tensor([bits_digest(buffer) for buffer in buffers], dtype=torch.int64)
    # If the largest digest is the smallest, all are equal; ~ is descending and does not overflow.
    extremes = torch.cat([digests, ~digests]).to(network.device)
    network.control.all_reduce(extremes, op=dist.ReduceOp.MAX).wait()
    largest, least = extremes.chunk(2)
    differs = (largest != ~least).tolist()
    return [buffer for buffer, is_different in zip(buffers, differs, strict=True) if is_different]


def _average(
    buffers: Sequence[Tensor], network: Network, *, dtype: torch.dtype, share: float
) -> None:
    finite = [buffer.isfinite().all() for buffer in buffers]
    shares = torch.stack(finite).to(network.device, dtype) * share
    own = [
        buffer.reshape(-1).to(network.device, dtype) * share
        if known
        else shares.new_zeros(buffer.numel())
        for buffer, known in zip(buffers, finite, strict=True)
    ]
    flat = torch.cat([*own, shares])  # the last ones count workers
    network.data.all_reduce(flat).wait()
    *totals, workers = torch.split(flat, [*map(len, own), len(buffers)])
    for buffer, total, count in zip(buffers, totals, workers.tolist(), strict=True):
        if count:
            buffer.copy_((total / count).view_as(buffer))
