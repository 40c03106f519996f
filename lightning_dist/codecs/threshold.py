"""``threshold``: only the elements that have become large enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec

_UNITS = ("rms", "absolute")
_VALUES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Threshold(Codec):
    """Elements of gradient + residual with ``|x| > tau``, as (index, value).

    ``unit="rms"``: ``tau`` is in units of the root mean square of the tensor, so it follows the
    size of the gradients; ``"absolute"``: in units of the unscaled gradient. With a very small
    ``tau`` everything is sent, at more bytes than uncompressed; with a very large one, nothing.

    The number ``k`` of these elements changes from step to step, and ranks exchange it first. Wire
    bytes per rank and step: ``(W-1) * k (4 + 2)`` for the largest ``k`` of all ranks, plus ``8
    (W-1)`` per bucket. State: one residual per element, without which small elements would never be
    sent. Use ``topk`` where the number of bytes must be known.

    Strom, "Scalable distributed DNN training using commodity GPU cloud computing" (Interspeech
    2015); as (index, value) in GRACE (Xu et al., ICDCS 2021).
    """

    tau: float = 3.0
    unit: str = "rms"  # or "absolute"
    values: str = "bf16"  # or "fp32"

    name: ClassVar[str] = "threshold"
    use: ClassVar[str] = "very slow links, if bytes may vary from step to step"
    exchange: ClassVar[str] = "gather"
    min_numel: ClassVar[int] = 4096
    keeps_residual: ClassVar[bool] = True
    fusable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        tau: object = self.tau
        number = isinstance(tau, float | int) and not isinstance(tau, bool)
        if not number or not 0 < self.tau < math.inf:
            raise ValueError(
                f"threshold: tau must be a positive number, got {tau!r}; 3 (times the root mean "
                "square) is the default"
            )
        if self.unit not in _UNITS:
            raise ValueError(
                f"threshold: unit must be 'rms' (of each tensor) or 'absolute', got {self.unit!r}; "
                "use 'rms'"
            )
        if self.values not in _VALUES:
            raise ValueError(
                f"threshold: values must be 'bf16' or 'fp32', got {self.values!r}; use 'bf16'"
            )

    @property
    def seldom(self) -> bool:
        return True

    @property
    def value_dtype(self) -> torch.dtype:
        return _VALUES[self.values]

    def limit(self, x: Tensor, scale: Tensor) -> Tensor:
        """0-d: the largest magnitude that is not sent."""
        unit = scale
        if self.unit == "rms":
            norm = torch.linalg.vector_norm(x, dtype=torch.float64)
            unit = (norm / max(1, x.numel()) ** 0.5).to(x.dtype)
        return self.tau * unit

    def select(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """``x (n,)`` -> indices ``(k,)`` int64, ascending, and values ``(k,)``; NaN is taken."""
        indices = self._is_large(x, scale).nonzero().flatten()
        return indices, x[indices].to(self.value_dtype)

    def approximate(
        self, x: Tensor, *, scale: Tensor, step: int, factors: Sequence[Tensor] = ()
    ) -> Tensor:
        return torch.where(self._is_large(x, scale), x.to(self.value_dtype).to(x.dtype), 0)

    def _is_large(self, x: Tensor, scale: Tensor) -> Tensor:
        size = x.abs()
        return ~(size <= self.limit(x, scale)) | ~size.isfinite()
