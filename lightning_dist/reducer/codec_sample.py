"""Samples of the compression error: some elements of a gradient, encoded by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist.base.accelerator import placed
from lightning_dist.codecs.base import Codec
from lightning_dist.codecs.memory import Memory
from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState

_RUN = 4096
"""Elements that are drawn together: scattered ones cost more to read than to look at."""


@dataclass(frozen=True)
class CodecSample:
    """Sample of elements, the same ones of four tensors, in the compute dtype.

    All but the residual carry the GradScaler's scale.

    Args:
        gradient: as it was given to the codec and its memory.
        compensated: what is encoded: gradient and residual.
        sent: what the own payload says of ``compensated``.
        residual: the one before; None: the codec keeps none.
    """

    gradient: Tensor
    compensated: Tensor
    sent: Tensor
    residual: Tensor | None


class Sampler:
    """Draws runs of elements at random, the same ones for the same seed and the same questions.

    At random, because every n-th element says little of a codec that chooses among neighbours.
    torch's own generator is left alone.

    Args:
        share: of the elements, 0 to 1; with 1 or more it takes all.
    """

    def __init__(self, seed: int, *, share: float) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._share = share

    def drawn(self, count: int, *, of: int) -> Tensor:
        """Which of ``count`` items of ``of`` elements each, ascending int64 on the host; at times
        none.
        """
        run = max(1, _RUN // of)
        runs = -(-count // run)
        # A part of a run is taken as often as it is large: few elements are seen as often as many.
        part = float(torch.rand((), generator=self._generator, device="cpu"))
        wanted = runs if self._share >= 1 else int(self._share * runs + part)
        order = torch.randperm(runs, generator=self._generator, device="cpu")
        first = order[:wanted].sort().values * run
        items = (first.unsqueeze(-1) + torch.arange(run, device="cpu")).flatten()
        return items[items < count]


def samples_of(
    codec: Codec,
    slices: Sequence[ParameterSlice],
    flat: Tensor,
    state: ReducerState,
    memory: Memory,
    sampler: Sampler,
    *,
    scale: Tensor,
    step: int,
) -> Iterator[CodecSample]:
    """Samples of the gradients in ``flat`` that ``codec`` encodes next, with a loss.

    Of the elements that ``sampler`` draws: blocks, with zeros behind the last element of a tensor,
    or whole tensors. Changes nothing; the gradients are read until they are encoded.
    """
    dtype, device = compute_dtype(flat.dtype), flat.device
    for part in slices:
        block = codec.block or part.numel
        numbers = sampler.drawn(-(-part.numel // block), of=block)
        if not len(numbers):
            continue
        at = numbers.unsqueeze(-1) * block + torch.arange(block, device="cpu")
        exists = placed(at < part.numel, device)
        at = placed(at.clamp(max=part.numel - 1), device)
        flats = [part.of(flat).to(dtype)]
        for kind in memory.kinds:
            flats.append(state.per_rank(kind, part, dtype=dtype, device=device))
        gradient, *held = (tensor[at] * exists for tensor in flats)
        compensated = memory.compensated(gradient, tuple(held), scale)
        if not codec.block:
            compensated = part.shaped(compensated[0])
        factors = state.factors.get(part.name, ())
        sent = codec.approximate(compensated, scale=scale, step=step, factors=factors)
        if sent is not None:
            if codec.block:
                sent = sent * exists
            residual = held[0] if "residual" in memory.kinds else None
            yield CodecSample(gradient, compensated, sent, residual)
