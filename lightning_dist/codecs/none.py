"""``none``: the gradient itself, the baseline of every other codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Payload, Plane
from lightning_dist.codecs.memory import Memory, Momentum, NoMemory


@dataclass(frozen=True)
class NoCompression(BlockCodec):
    """The gradient in its own dtype, in one allreduce per bucket, as in DDP itself.

    A flat exchange is bit-identical to DistributedDataParallel without a hook; a hierarchical one
    adds in another order. Wire bytes per rank and step: ``2 (W-1)/W * n * itemsize``. State: none.
    Use it as the baseline, or to switch compression off without another change.
    """

    name: ClassVar[str] = "none"
    use: ClassVar[str] = "no compression: the baseline to compare with"
    exchange: ClassVar[str] = "allreduce"
    lossless: ClassVar[bool] = True

    def inside_node(self) -> BlockCodec:
        return self

    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        return (Plane(dtype, 1),)

    def encode(self, x: Tensor, keys: Tensor | None = None) -> Payload:
        return (x,)

    def decode(self, payload: Payload, dtype: torch.dtype, keys: Tensor | None = None) -> Tensor:
        return payload[0].to(dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


@dataclass(frozen=True)
class Uncompressed(NoCompression):
    """``none`` for the small tensors beside a block codec, in a two-shot exchange.

    A ring adds in an order that depends on the position of an element in its bucket, which DDP
    changes after the first backward pass. The two-shot exchange adds in rank order, so a resumed
    run is bit-identical to an uninterrupted one at any world size. It sends the bytes of a ring.
    """

    momentum: float = 0.0  # of the local gradients, beside a codec with momentum correction

    exchange: ClassVar[str] = "two_shot"

    def __str__(self) -> str:
        return self.name

    @property
    def momentum_correction(self) -> float:
        return self.momentum

    def memory(self, error_feedback: bool | Literal["auto"] = "auto") -> Memory:
        return Momentum(self.momentum) if self.momentum else NoMemory()
