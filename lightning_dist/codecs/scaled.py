"""Base of the codecs with short codes and one scale per block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Payload, Plane
from lightning_dist.codecs.scales import block_scale, pack, per_step, unpack

_LEAST_BLOCK = 16


@dataclass(frozen=True)
class ScaledBlocks(BlockCodec):
    """Blocks of ``block_size`` codes and a bfloat16 scale: ``from_codes(to_codes(x / s)) s``.

    A subclass sets :attr:`bits`, and overrides :meth:`to_codes` and :meth:`from_codes` where codes
    do not stand for integers from ``-levels`` to ``levels``.
    """

    block_size: int = 256  # smaller: finer scales, more bytes for them

    code_dtype: ClassVar[torch.dtype] = torch.uint8
    exchange: ClassVar[str] = "two_shot"
    min_numel: ClassVar[int] = 4096

    def __post_init__(self) -> None:
        size: object = self.block_size
        if type(size) is not int or not 16 <= size <= 65536 or size % 16:
            default = next(f.default for f in fields(self) if f.name == "block_size")
            raise ValueError(
                f"{self.name}: block_size must be a multiple of 16 from 16 to 65536, got {size!r}; "
                f"{default} is the default"
            )

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a code: 1, 2, 4 or 8."""

    @property
    def levels(self) -> int:
        """The largest code: that of an element as large as the norm of its block."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def block(self) -> int:
        return self.block_size

    def smaller_blocks(self) -> Iterator[BlockCodec]:
        size = self.block_size
        while size >= _LEAST_BLOCK:
            yield replace(self, block_size=size)
            size = size // 2 // _LEAST_BLOCK * _LEAST_BLOCK

    def norm_of(self, x: Tensor) -> Tensor:
        """Norm ``(..., 1)`` of every block of ``x``: the largest magnitude."""
        return x.abs().amax(-1, keepdim=True)

    def to_codes(self, y: Tensor, keys: Tensor | None) -> Tensor:
        """Plane of the codes of ``y``, the gradient in units of its scale."""
        return pack(self.rounded(y, keys) + self.levels, bits=self.bits)

    def rounded(self, y: Tensor, keys: Tensor | None) -> Tensor:
        """Integers from ``-levels`` to ``levels``, one for every element of ``y``."""
        return torch.round(y)

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Elements in units of their scale: the inverse of :meth:`to_codes`."""
        return unpack(codes, bits=self.bits).to(dtype) - self.levels

    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        codes = self.block_size * self.bits // 8
        return Plane(torch.bfloat16, 1), Plane(self.code_dtype, codes)

    def encode(self, x: Tensor, keys: Tensor | None = None) -> Payload:
        scale = block_scale(self.norm_of(x), levels=self.levels)
        return scale.to(torch.bfloat16), self.to_codes(x * per_step(scale), keys)

    def decode(self, payload: Payload, dtype: torch.dtype, keys: Tensor | None = None) -> Tensor:
        scale, codes = payload
        return self.from_codes(codes, dtype) * scale.to(dtype)

    def finite(self, payload: Payload) -> Tensor:
        return payload[0].isfinite().all()
