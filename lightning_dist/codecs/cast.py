"""``fp16`` and ``bf16``: half the bytes, summed by the network in the short type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Payload, Plane


@dataclass(frozen=True)
class _Cast(BlockCodec):
    exchange: ClassVar[str] = "allreduce"
    wire_dtype: ClassVar[torch.dtype]
    relative_error: ClassVar[float]
    smallest: ClassVar[float]

    def inside_node(self) -> BlockCodec:
        return self

    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        return (Plane(self.wire_dtype, 1),)

    def encode(self, x: Tensor, keys: Tensor | None = None) -> Payload:
        return (x.to(self.wire_dtype),)

    def decode(self, payload: Payload, dtype: torch.dtype, keys: Tensor | None = None) -> Tensor:
        return payload[0].to(dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        representable = x.abs() <= torch.finfo(self.wire_dtype).max
        bound = x.abs() * self.relative_error + self.smallest
        return torch.where(representable, bound, torch.full_like(x, torch.inf))


@dataclass(frozen=True)
class FP16(_Cast):
    """IEEE half precision, as torch's ``fp16_compress_hook``, and on gloo too.

    The gradient is divided by the world size *before* the cast, so the sum cannot overflow where
    the mean does not. Values below 3e-8 become 0, values above 65504 become inf, which a GradScaler
    detects. Wire bytes per rank and step: ``2 (W-1)/W * 2 n``. State: none by default.
    """

    name: ClassVar[str] = "fp16"
    use: ClassVar[str] = "half the bytes, if a GradScaler is in use"
    wire_dtype: ClassVar[torch.dtype] = torch.float16
    relative_error: ClassVar[float] = 2.0**-11
    smallest: ClassVar[float] = 2.0**-25  # half of the smallest subnormal


@dataclass(frozen=True)
class BF16(_Cast):
    """bfloat16: the range of float32 with 8 bits of precision. Works on gloo, unlike torch's hook.

    The ring adds in bfloat16, so the error grows with the world size (2^-8 relative per addition).
    Wire bytes per rank and step: ``2 (W-1)/W * 2 n``. State: none by default. The safe first choice
    on a fast network.
    """

    name: ClassVar[str] = "bf16"
    use: ClassVar[str] = "half the bytes without loss of quality: fast networks"
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16
    relative_error: ClassVar[float] = 2.0**-8
    smallest: ClassVar[float] = 2.0**-134
