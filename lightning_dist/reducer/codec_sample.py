"""Samples of the compression error: some elements of a gradient, encoded by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from lightning_dist.accelerator import placed
from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.codecs.noise import block_keys
from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.reducer.plan.fitting import fitted
from lightning_dist.reducer.plan.slices import ParameterSlice

if TYPE_CHECKING:
    from lightning_dist.reducer.plan.planner import Planner

_RUN = 4096
"""Elements that are drawn together: scattered ones cost more to read than to look at."""


@dataclass(frozen=True)
class CodecSample:
    """The same elements of four tensors in the compute dtype.

    All but the residual carry the GradScaler's scale.

    Args:
        gradient: as it was given to the codec and its memory.
        compensated: what is encoded: the gradient and what was still owed.
        sent: what the own payload says of ``compensated``.
        residual: what was owed before; None: nothing is kept.
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


@dataclass(frozen=True)
class SampleSource:
    """Gradients in ``flat`` that ``codec`` encodes next, with a loss; read until then."""

    codec: Codec
    slices: Sequence[ParameterSlice]
    flat: Tensor
    planner: Planner

    def samples(self, sampler: Sampler, scale: Tensor, *, step: int) -> Iterator[CodecSample]:
        """Of the elements that ``sampler`` draws. Changes nothing."""
        dtype, state = compute_dtype(self.flat.dtype), self.planner.state
        memory = self.codec.memory(self.planner.error_feedback)
        for part in self.slices:
            flats = [part.of(self.flat)]
            for kind in memory.kinds:
                flats.append(state.per_rank(kind, part, dtype=dtype, device=self.flat.device))
            draw = _draw(self.codec, part, flats, sampler, self.planner)
            if draw is None:
                continue
            (gradient, *held), approximate = draw
            gradient = gradient.to(dtype, copy=True)
            compensated = memory.compensated(gradient, tuple(held), scale)
            sent = approximate(compensated, scale, step)
            if sent is not None:
                kept = held[0].clone() if "residual" in memory.kinds else None
                yield CodecSample(gradient, compensated, sent, kept)


Approximate: TypeAlias = Callable[[Tensor, Tensor, int], Tensor | None]
"""What a payload says of a compensated gradient, from this, the scale and the step."""


@singledispatch
def _draw(
    codec: Codec,
    part: ParameterSlice,
    flats: Sequence[Tensor],
    sampler: Sampler,
    planner: Planner,
) -> tuple[Sequence[Tensor], Approximate] | None:
    """Elements of ``flats``, gradient and state of ``part``; None where none is drawn.

    All or none of a tensor, if the codec does not encode blocks.
    """
    if not len(sampler.drawn(1, of=part.numel)):
        return None

    def approximate(compensated: Tensor, scale: Tensor, step: int) -> Tensor | None:
        factors = planner.state.factors.get(part.name, ())
        return codec.approximate(compensated, scale=scale, step=step, factors=factors)

    return [part.shaped(flat) for flat in flats], approximate


@_draw.register(BlockCodec)
def _draw_blocks(
    codec: BlockCodec,
    part: ParameterSlice,
    flats: Sequence[Tensor],
    sampler: Sampler,
    planner: Planner,
) -> tuple[Sequence[Tensor], Approximate] | None:
    """``(blocks, block)``, with zeros behind the last element of a tensor."""
    device, dtype = flats[0].device, flats[0].dtype
    codec = fitted(codec, part.numel, ranks=planner.network.world_size, dtype=dtype)
    numbers = sampler.drawn(-(-part.numel // codec.block), of=codec.block)
    if not len(numbers):
        return None
    at = numbers.unsqueeze(-1) * codec.block + torch.arange(codec.block, device="cpu")
    exists, at = placed(at < part.numel, device), placed(at.clamp(max=part.numel - 1), device)
    blocks = placed(numbers.to(torch.int32).unsqueeze(-1), device)
    passes = planner.kernels(codec, dtype).passes

    def approximate(compensated: Tensor, scale: Tensor, step: int) -> Tensor:
        keys = block_keys(blocks, step) if codec.stochastic else None
        return passes.approximate(compensated, keys) * exists

    return [flat[at] * exists for flat in flats], approximate
