"""``int8``: one byte an element and one scale a block, the default of ``compressed_ddp``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec, ExchangeName, Payload, Plane

# A scale is cut to bfloat16 (toward zero, at most one part in 128 less), so it starts 0.8 % larger:
# after the cut it is still at least amax/127 and no code leaves [-127, 127].
_HEADROOM = 1.008
_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Int8(Codec):
    """Blockwise absmax quantisation: ``q = round(x / s)``, ``s = amax(block) / 127``.

    ``|x - q s| <= s/2`` for every element, ``s <= 1.008 amax / 127``. The scale is a bfloat16, so
    ``q * s`` needs 15 bits and is *exact* in float32: eager, compiled, CPU and GPU kernels, fused
    multiply-add or not, decode the same bytes to the same floats.

    Wire bytes per rank and step: ``2 (W-1)/W * n (1 + 2/block)``, about 3.97 times less than
    float32. State: one residual per element (error feedback). Block scales rather than one per
    tensor: 870 times less squared error on heavy-tailed gradients.

    Blockwise 8-bit: Dettmers, "8-bit approximations for parallelism" (arXiv 1511.04561) and
    "8-bit optimizers via block-wise quantization" (arXiv 2110.02861).
    """

    block_size: int = 256  # smaller: finer scales, more bytes for them

    name: ClassVar[str] = "int8"
    exchange: ClassVar[ExchangeName] = "two_shot"
    min_numel: ClassVar[int] = 4096
    keeps_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 16 <= self.block_size <= 65536 or self.block_size % 16:
            raise ValueError(
                f"int8: block_size must be a multiple of 16 from 16 to 65536, got "
                f"{self.block_size}; 256 is the measured default"
            )

    @property
    def block(self) -> int:
        return self.block_size

    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        return Plane(torch.bfloat16, 1), Plane(torch.int8, self.block_size)

    def encode(self, x: Tensor) -> Payload:
        amax = x.abs().amax(-1, keepdim=True).to(torch.float32)
        # The cut is done on the bits: compilers drop a cast to bfloat16 and back.
        scale = ((amax * (_HEADROOM / 127)).view(torch.int32) & -65536).view(torch.float32)
        per_step = 1.0 / scale.clamp_min(_SMALLEST_NORMAL)
        return scale.to(torch.bfloat16), torch.round(x * per_step).to(torch.int8)

    def decode(self, payload: Payload, dtype: torch.dtype) -> Tensor:
        scale, codes = payload
        return codes.to(dtype) * scale.to(dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        amax = x.abs().amax(-1, keepdim=True)
        amax = torch.where(amax <= torch.finfo(torch.float32).max, amax, torch.inf)
        # The second term: x / s is rounded once before it is rounded to an integer, and blocks
        # whose scale is subnormal lose everything.
        return amax * (_HEADROOM / 127 / 2 * (1 + 1e-4)) + 128 * _SMALLEST_NORMAL

    def finite(self, payload: Payload) -> Tensor:
        return payload[0].isfinite().all()
