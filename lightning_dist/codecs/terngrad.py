"""``terngrad``: two bits an element, -1, 0 or 1 at random so that the mean is exact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs.qsgd import round_at_random
from lightning_dist.codecs.scaled import ScaledBlocks
from lightning_dist.codecs.scales import HEADROOM, SMALLEST_NORMAL, representable


@dataclass(frozen=True)
class TernGrad(ScaledBlocks):
    """Signs at random: ``s sign(x) b``, where ``b`` is 1 with probability ``|x| / s``, else 0.

    ``s = amax(block)``. Unbiased, with variance ``|x| (s - |x|)`` of each element: one large
    element makes all others noisy. ``clip_sigma`` (the paper trains with 2.5) first clips to that
    many times the block's root mean square, which trades a bias on spikes for less noise; around
    zero rather than around the mean, so that a block of equal values is kept.

    Wire bytes per rank and step: ``2 (W-1)/W * n (1/4 + 2/block)``, 15.8 times less than float32.
    State: none. Not for error feedback: the noise is larger than the gradient. Use it with many
    ranks, whose mean averages the noise, and no memory for residuals; else ``int4``.

    Wen et al., "TernGrad" (arXiv 1705.07878).
    """

    block_size: int = 512  # the variance relative to the gradient grows with it
    clip_sigma: float = 0.0  # 0: no clipping

    name: ClassVar[str] = "terngrad"
    use: ClassVar[str] = "many ranks, no memory for residuals"
    stochastic: ClassVar[bool] = True
    bits: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        clip: object = self.clip_sigma
        if not isinstance(clip, float | int) or not (clip == 0 or 1 <= clip < math.inf):
            raise ValueError(
                "terngrad: clip_sigma must be 0 (no clipping) or a finite number from 1, got "
                f"{clip!r}; the paper uses 2.5"
            )

    @property
    def contraction(self) -> bool:
        return False

    def norm_of(self, x: Tensor) -> Tensor:
        amax = super().norm_of(x)
        if not self.clip_sigma:
            return amax
        # In float64 for the same two reasons as in qsgd.py. The minimum keeps NaN, and the sum of
        # squares of a block with an infinity must not win over it.
        rms = x.to(torch.float64).square().mean(-1, keepdim=True).sqrt()
        return torch.minimum(amax.to(torch.float64), rms * self.clip_sigma)

    def rounded(self, y: Tensor, keys: Tensor | None) -> Tensor:
        # Nothing is cut here unless clip_sigma is set: the scale is at least amax.
        return round_at_random(y.clamp(-1, 1), keys)

    def error_bound(self, x: Tensor) -> Tensor:
        limit = representable(self.norm_of(x).to(x.dtype) * HEADROOM)
        return torch.maximum(limit * (1 + 1e-4), x.abs()) + 2 * SMALLEST_NORMAL
