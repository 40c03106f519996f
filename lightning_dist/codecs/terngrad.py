"""``terngrad``: two bits an element, -1, 0 or 1 at random so that the mean is exact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs.base import Payload, Plane
from lightning_dist.codecs.qsgd import round_at_random
from lightning_dist.codecs.scaled import ScaledBlocks
from lightning_dist.codecs.scales import (
    HEADROOM,
    SMALLEST_NORMAL,
    block_scale,
    pack,
    per_step,
    unpack,
)


@dataclass(frozen=True)
class TernGrad(ScaledBlocks):
    """``s sign(x) b``, ``b`` is 1 with probability ``|x| / s``, else 0; ``s = amax(block)``.

    Unbiased, with variance ``|x| (s - |x|)`` of each element: one large element makes all others
    noisy. ``clip_sigma`` (the paper trains with 2.5) first clips to that many times the block's
    root mean square, which trades a bias on spikes for less noise; around zero rather than around
    the mean, so that a block of equal values is kept.

    Wire bytes per rank and step: ``2 (W-1)/W * n (1/4 + 2/block)``, 15.8 times less than float32.
    State: none. Not for error feedback: the noise is larger than the gradient. Use it with many
    ranks, whose mean averages the noise, and no memory for residuals; else ``int4``.

    Wen et al., "TernGrad" (arXiv 1705.07878).
    """

    block_size: int = 512  # the variance relative to the gradient grows with it
    clip_sigma: float = 0.0  # 0: no clipping

    name: ClassVar[str] = "terngrad"
    use: ClassVar[str] = "many ranks and no memory for residuals"
    stochastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        clip: object = self.clip_sigma
        if not isinstance(clip, float | int) or not (clip == 0 or 1 <= clip < math.inf):
            raise ValueError(
                f"terngrad: clip_sigma must be 0 (no clipping) or a finite number from 1, got "
                f"{clip!r}; the paper uses 2.5"
            )

    @property
    def contraction(self) -> bool:
        return False

    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        return Plane(torch.bfloat16, 1), Plane(torch.uint8, self.block_size // 4)

    def encode(self, x: Tensor, keys: Tensor | None = None) -> Payload:
        scale = block_scale(self._limit(x), levels=1)
        # Nothing is cut here unless clip_sigma is set: the scale is at least amax.
        signs = round_at_random((x * per_step(scale)).clamp(-1, 1), keys)
        return scale.to(torch.bfloat16), pack(signs + 1, bits=2)

    def decode(self, payload: Payload, dtype: torch.dtype, keys: Tensor | None = None) -> Tensor:
        scale, packed = payload
        return (unpack(packed, bits=2).to(dtype) - 1) * scale.to(dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        limit = self._limit(x).to(x.dtype) * HEADROOM
        limit = torch.where(limit <= torch.finfo(torch.float32).max, limit, torch.inf)
        return torch.maximum(limit * (1 + 1e-4), x.abs()) + 2 * SMALLEST_NORMAL

    def _limit(self, x: Tensor) -> Tensor:
        amax = x.abs().amax(-1, keepdim=True)
        if not self.clip_sigma:
            return amax
        # In float64 for the same two reasons as in qsgd.py. The minimum keeps NaN, and the sum of
        # squares of a block with an infinity must not win over it.
        rms = x.to(torch.float64).square().mean(-1, keepdim=True).sqrt()
        return torch.minimum(amax.to(torch.float64), rms * self.clip_sigma)
