"""Base of the codecs with short codes and one scale per block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, ExchangeName, Payload

_LEAST_BLOCK = 16


@dataclass(frozen=True)
class ScaledBlocks(BlockCodec):
    """Blocks of ``block_size`` codes; the first plane of the payload is their bfloat16 scale."""

    block_size: int = 256  # smaller: finer scales, more bytes for them

    exchange: ClassVar[ExchangeName] = "two_shot"
    min_numel: ClassVar[int] = 4096

    def __post_init__(self) -> None:
        size: object = self.block_size
        if type(size) is not int or not 16 <= size <= 65536 or size % 16:
            default = next(f.default for f in fields(self) if f.name == "block_size")
            raise ValueError(
                f"{self.name}: block_size must be a multiple of 16 from 16 to 65536, got "
                f"{size!r}; {default} is the default"
            )

    @property
    def block(self) -> int:
        return self.block_size

    def smaller_blocks(self) -> Iterator[BlockCodec]:
        size = self.block_size
        while size >= _LEAST_BLOCK:
            yield replace(self, block_size=size)
            size = size // 2 // _LEAST_BLOCK * _LEAST_BLOCK

    def finite(self, payload: Payload) -> Tensor:
        return payload[0].isfinite().all()
