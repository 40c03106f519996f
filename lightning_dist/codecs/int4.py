"""``int4``: half a byte an element and one scale a block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs.base import Payload
from lightning_dist.codecs.scaled import ScaledBlocks
from lightning_dist.codecs.scales import HEADROOM, SMALLEST_NORMAL, full_precision, representable


@dataclass(frozen=True)
class Int4(ScaledBlocks):
    """Blockwise absmax quantisation to ``q`` in [-7, 7]: ``q = round(x / s)``, ``s = amax / 7``.

    ``|x - q s| <= s/2``, ``s <= 1.008 amax / 7``. With ``hadamard`` each block is rotated first,
    which spreads a spike over the block: for heavy-tailed gradients four times less squared error
    with blocks of 128, for Gaussian ones no gain, and the rotation costs time. Two codes share a
    byte. The inverse rotation is of integers, so it is exact in float32 too.

    Wire bytes per rank and step: ``2 (W-1)/W * n (1/2 + 2/block)``, 7.75 times less than float32.
    State: one residual per element (error feedback), without which 4 bits cost accuracy. Use it
    links below about 1 Gbit/s, where int8 is still limited.

    4-bit gradients with a 128-Hadamard rotation: SDP4Bit (arXiv 2410.15526); ZeRO++ (arXiv
    2306.10209) sends 4 bits between nodes.
    """

    block_size: int = 128  # smaller: finer scales, more bytes for them
    hadamard: bool = False

    name: ClassVar[str] = "int4"
    use: ClassVar[str] = "links below about 1 Gbit/s, where int8 is still limited"
    keeps_residual: ClassVar[bool] = True
    bits: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hadamard and (self.block_size & (self.block_size - 1) or self.block_size > 1024):
            raise ValueError(
                "int4: hadamard needs a block_size that is a power of two up to 1024, got "
                f"{self.block_size}; use 128, or leave hadamard out"
            )

    @property
    def fusable(self) -> bool:  # type: ignore[override]  # a rotation is a matrix product
        return not self.hadamard

    def encode(self, x: Tensor, keys: Tensor | None = None) -> Payload:
        if self.hadamard:
            # Divided by the block size: the rotation back multiplies by 1 and -1 only.
            with full_precision():
                x = (x / self.block_size) @ _hadamard(self.block_size, x.dtype, x.device)
        return super().encode(x, keys)

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        numbers = super().from_codes(codes, dtype)
        if self.hadamard:
            with full_precision():
                numbers = numbers @ _hadamard(self.block_size, dtype, codes.device)
        return numbers

    def error_bound(self, x: Tensor) -> Tensor:
        amax = representable(self.norm_of(x))
        half_step = HEADROOM / self.levels / 2 * (1 + 1e-4)
        if self.hadamard:
            # The rotated block's largest element is at most sum|x|; errors of all codes add up.
            sizes = x.abs() / self.block_size
            half_step *= self.block_size
            amax = torch.where(amax.isfinite(), sizes.sum(-1, keepdim=True), torch.inf)
        return amax * half_step + self.block_size * 8 * SMALLEST_NORMAL


@cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The symmetric ``(size, size)`` matrix of 1 and -1 with ``H @ H == size * I`` (Sylvester)."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    for _ in range(int(math.log2(size))):
        matrix = torch.cat(
            [torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)]
        )
    return matrix
