"""``qsgd``: a few bits an element, rounded at random so that the mean is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs import noise
from lightning_dist.codecs.scaled import ScaledBlocks
from lightning_dist.codecs.scales import HEADROOM, SMALLEST_NORMAL, representable

_NORMS = ("max", "l2")
_ONE = 1 << 24  # 1.0 in fixed point


@dataclass(frozen=True)
class QSGD(ScaledBlocks):
    """Unbiased rounding to ``2L + 1`` levels, ``L = 2**(bits-1) - 1``: ``E[q] s = x``.

    ``s = norm(block) / L``, and ``q`` is one of the two integers around ``x / s``, the upper one
    with the probability ``p`` of the fraction. The variance of an element is
    ``s^2 p (1-p) <= s^2 / 4``. The paper analyses ``norm="l2"`` and trains with ``"max"``, whose
    steps are smaller.

    Wire bytes per rank and step: ``2 (W-1)/W * n (bits/8 + 2/block)``. State: none. Use it where
    there is no memory for residuals, or the optimizer needs unbiased gradients. With error feedback
    ``int8`` and ``int4`` are better at the same bytes.

    Alistarh et al., "QSGD" (arXiv 1610.02132), without the Elias code.
    """

    block_size: int = 512  # the variance relative to the gradient grows with it
    bits: int = 4
    norm: str = "max"  # or "l2"

    name: ClassVar[str] = "qsgd"
    use: ClassVar[str] = "few bytes, no memory for residuals"
    stochastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        bits: object = self.bits
        if not isinstance(bits, int) or bits not in (2, 4, 8):
            raise ValueError(f"qsgd: bits must be 2, 4 or 8, got {bits!r}; use 4, the default")
        super().__post_init__()
        if self.norm not in _NORMS:
            raise ValueError(f"qsgd: norm must be 'max' or 'l2', got {self.norm!r}; use 'max'")

    @property
    def contraction(self) -> bool:
        # In units of s an element y has variance p(1-p) with p its fraction, and
        # E|Q(x)-x|^2 < |x|^2 for all x iff sum p(1-p) < sum y^2.
        # "l2": sum y^2 = (L/h)^2, h the scale's headroom, and p(1-p) <= 1/4, reached by all at
        # y = 1/2: d < 4 (L/h)^2.
        # "max": one y >= L/h, with p(1-p) <= 1/4; p(1-p) - y^2 of each other is at most 1/8, at
        # y = 1/4: (d-1) / 8 + 1/4 < (L/h)^2.
        least = (self.levels / HEADROOM) ** 2
        if self.norm == "l2":
            return self.block_size < 4 * least
        return self.block_size - 1 < 8 * (least - 0.25)

    def norm_of(self, x: Tensor) -> Tensor:
        if self.norm == "max":
            return super().norm_of(x)
        # In float64 no square of a float32 overflows, and the order of adding, in which compilers
        # differ, changes nothing that is left after the cut to bfloat16.
        return x.to(torch.float64).square().sum(-1, keepdim=True).sqrt()

    def rounded(self, y: Tensor, keys: Tensor | None) -> Tensor:
        return round_at_random(y, keys)

    def error_bound(self, x: Tensor) -> Tensor:
        step = representable(self.norm_of(x).to(x.dtype) * (HEADROOM / self.levels))
        return step * (1 + 1e-4) + 2 * self.levels * SMALLEST_NORMAL


def round_at_random(y: Tensor, keys: Tensor | None) -> Tensor:
    """int32, each of the two integers around ``y`` with the probability that makes ``y`` the mean.

    ``|y| < 127.5``. In fixed point: whether a compiler contracts ``x * per_step + u`` to one
    multiply-add then cannot change the bytes.
    """
    assert keys is not None, "a stochastic codec was not given keys"
    fixed = (y * _ONE).to(torch.int32)
    return (fixed + noise.uniform24(keys, y.shape[-1])) >> 24
