"""Counters for stochastic codecs: where the randomness of a unit comes from.

A key depends on the codec (and its seed), the step, the parameter, the block in it and the rank;
on nothing that a bucket layout, a restart or a kernel's cut could change.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec
from lightning_dist.codecs.noise import block_keys
from lightning_dist.reducer.units.tiles import Tile


class UnitKeys:
    """``encode (rows, B, 1)`` for what this rank sends, ``reduce (1, B, 1)`` for the mean."""

    def __init__(self, codec: BlockCodec, tiles: Sequence[Tile], *, rank: int) -> None:
        self._codec, self._tiles, self._rank = codec, tiles, rank
        rows, blocks = len(tiles[0].numbers), tiles[-1].columns.stop
        device = tiles[0].numbers.device
        self.encode = torch.zeros(rows, blocks, 1, dtype=torch.int32, device=device)
        self.reduce = torch.zeros(1, blocks, 1, dtype=torch.int32, device=device)

    def draw(self, step: int) -> None:
        """New keys for ``step``."""
        who = "all" if self._codec.shared_keys else str(self._rank)
        for tile in self._tiles:
            own = _salt(self._codec, step, tile.name, who)
            self.encode[:, tile.columns] = block_keys(tile.numbers, own)
            if len(tile.numbers) > 1:  # this rank owns a row and rounds its mean
                row = tile.numbers[self._rank : self._rank + 1]
                mean = _salt(self._codec, step, tile.name, "mean")
                self.reduce[:, tile.columns] = block_keys(row, mean)


def unit_salts(codec: BlockCodec, names: Sequence[str], *, step: int, rank: int) -> Tensor:
    """int32 ``(2, names)`` on the host: what the keys of :class:`UnitKeys` are hashed with.

    The first row is for what this rank sends, the second for the means that it rounds.
    """
    who = "all" if codec.shared_keys else str(rank)
    salts = [[_salt(codec, step, name, of) for name in names] for of in (who, "mean")]
    return torch.tensor(salts, dtype=torch.int64, device="cpu").to(torch.int32)


def _salt(codec: BlockCodec, step: int, name: str, who: str) -> int:
    return zlib.crc32(f"{codec!r} {step} {name} {who}".encode())
