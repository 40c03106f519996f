"""``none``: the gradient itself. The anchor that every other codec is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, ExchangeName, Payload, Plane
from lightning_dist.codecs.memory import Memory, Momentum, NoMemory


@dataclass(frozen=True)
class NoCompression(BlockCodec):
    """Send the gradient in its own dtype through one allreduce per bucket, as DDP itself does.

    Flat, it is bit-identical to DistributedDataParallel without a hook; a hierarchical exchange
    adds in another order. Wire bytes per rank and step:
    ``2 (W-1)/W * n * itemsize``. State: none. Use it to switch compression off without changing
    anything else, and as the row to compare with.
    """

    name: ClassVar[str] = "none"
    use: ClassVar[str] = "no compression: the row to compare with, and a first try"
    exchange: ClassVar[ExchangeName] = "allreduce"
    lossless: ClassVar[bool] = True

    def inside_host(self) -> BlockCodec:
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
    """Codec of the small tensors beside a block codec: ``none``, summed by this package.

    Two-shot instead of a ring, because a ring adds in an order that depends on where an element
    lies in the bucket, and DDP moves it after the first backward: with this a resumed run repeats
    the uninterrupted one bit for bit at any world size. Same bytes as the ring.
    """

    momentum: float = 0.0  # of the local gradients, beside a codec that brings its own

    exchange: ClassVar[ExchangeName] = "two_shot"

    @property
    def momentum_correction(self) -> float:
        return self.momentum

    def memory(self, error_feedback: bool | Literal["auto"] = "auto") -> Memory:
        return Momentum(self.momentum) if self.momentum else NoMemory()
