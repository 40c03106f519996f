"""``threshold``: only the elements that have become large enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec, ExchangeName

_VALUES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Threshold(Codec):
    """Send every element of gradient + residual with ``|x| > tau``, as (index, value).

    How many bytes that is depends on the gradients and changes from step to step: ranks first tell
    each other how much they will send. Wire bytes per rank and step: ``(W-1) * k (4 + 2)`` for the
    largest ``k`` of all ranks, plus 8. State: one residual per element, without which the small
    ones would never arrive. ``tau`` is in units of the gradient (a GradScaler does not change it).
    Prefer ``topk`` unless you know the size of your gradients: with a small ``tau`` everything is
    sent, at more bytes than uncompressed; with a large one nothing is.

    Strom, "Scalable distributed DNN training using commodity GPU cloud computing" (Interspeech
    2015); as (index, value) in GRACE (Xu et al., ICDCS 2021).
    """

    tau: float = 1e-3
    values: str = "bf16"  # or "fp32"

    name: ClassVar[str] = "threshold"
    exchange: ClassVar[ExchangeName] = "gather"
    min_numel: ClassVar[int] = 4096
    keeps_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.tau < math.inf:
            raise ValueError(
                f"threshold: tau must be a positive number, in units of the gradient, got "
                f"{self.tau}; look at the gradients' sizes, or use topk:ratio=0.01"
            )
        if self.values not in _VALUES:
            raise ValueError(f"threshold: values must be 'bf16' or 'fp32', got {self.values!r}")

    @property
    def value_dtype(self) -> torch.dtype:
        return _VALUES[self.values]

    def select(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """``x (n,)`` -> indices ``(k,)`` int32, ascending, and values ``(k,)``; NaN is taken."""
        large = ~(x.abs() <= self.tau * scale)
        indices = large.nonzero().flatten()
        return indices.to(torch.int32), x[indices].to(self.value_dtype)

    def wire_bytes(self, chosen: int) -> int:
        """Bytes of the payload of ``chosen`` elements."""
        return chosen * (4 + self.value_dtype.itemsize)
