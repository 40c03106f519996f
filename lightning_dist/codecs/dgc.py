"""``dgc``: top-k with momentum before the choice and a ramp of sparsity."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_dist.codecs.base import Codec, Shape
from lightning_dist.codecs.memory import Memory, MomentumCorrection
from lightning_dist.codecs.topk import TopK

_FEWER_EACH_STAGE = 4


@dataclass(frozen=True)
class DGC(TopK):
    """Deep Gradient Compression: the largest 0.1 % of gradients with momentum.

    In every step a rank computes ``u = m u + clip(g)`` and ``v = v + u``, sends the top-k of ``v``,
    and sets ``u`` and ``v`` to zero where it was sent (momentum factor masking). Each rank clips
    the gradient of each tensor to the norm ``clip / sqrt(W)``.

    The momentum is in ``u``, so the optimizer must be SGD without momentum; others are refused, in
    plain DDP at their first step. Tensors that are not compressed get the momentum too. Steps
    before a ``start_step``, and training with one rank, have none: use ``warmup_steps`` instead.

    ``warmup_steps`` are divided into equal stages, each of a quarter of the density before it, from
    25 % to ``ratio``: sparsity 75, 93.75, 98.44, 99.6, then 99.9 %. The paper uses four epochs.

    Wire bytes as ``topk``; at 0.1 % and W=2 1170 times less than float32. State: ``u`` and ``v``,
    two per element. Use it for SGD on the slowest links.

    Lin et al. (arXiv 1712.01887).
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip: float = 0.0  # times 1/sqrt(W): largest norm of a tensor's local gradient; 0: any
    warmup_steps: int = 0

    name: ClassVar[str] = "dgc"
    use: ClassVar[str] = "the slowest links, with plain SGD"

    def __post_init__(self) -> None:
        super().__post_init__()
        momentum: object = self.momentum
        clip: object = self.clip
        steps: object = self.warmup_steps
        if not isinstance(momentum, float | int) or not 0 <= momentum < 1:
            raise ValueError(
                f"dgc: momentum must be a number from 0 to below 1, got {momentum!r}; the default "
                "is 0.9, with none in the optimizer"
            )
        if not isinstance(clip, float | int) or not 0 <= clip < math.inf:
            raise ValueError(
                f"dgc: clip must be 0 (no clipping) or a finite norm above 0, got {clip!r}; it "
                "limits the gradient norm of each tensor over the global batch"
            )
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(
                f"dgc: warmup_steps must be 0 (no ramp) or more synchronised steps, got {steps!r}; "
                "the paper uses four epochs"
            )

    @property
    def momentum_correction(self) -> float:
        return self.momentum

    @property
    def local_clip(self) -> float:
        return self.clip

    def memory(self, error_feedback: bool | Literal["auto"] = "auto") -> Memory:
        plain = super().memory(error_feedback)
        return MomentumCorrection(self.momentum) if self.momentum and plain.kinds else plain

    def for_tensor(self, name: str, shape: Shape, *, step: int) -> Codec:
        return self.leaves()[self.phase(step)]

    def phase(self, step: int) -> int:
        last = len(self._ramp()) - 1  # asked for every bucket of every step
        return last if step >= self.warmup_steps else step * last // self.warmup_steps

    def boundaries(self) -> tuple[int, ...]:
        last = len(self._ramp()) - 1
        return tuple(-(-i * self.warmup_steps // max(1, last)) for i in range(last + 1))

    def leaves(self) -> tuple[Codec, ...]:
        """The codecs of the ramp, the last with ``ratio``."""
        return tuple(
            dataclasses.replace(self, ratio=ratio, warmup_steps=0) for ratio in self._ramp()
        )

    def _ramp(self) -> tuple[float, ...]:
        ratios = []
        density = 1 / _FEWER_EACH_STAGE
        while self.warmup_steps and density > self.ratio:
            ratios.append(density)
            density /= _FEWER_EACH_STAGE
        return (*ratios, self.ratio)
