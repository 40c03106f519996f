"""Cut of a flat gradient into rows (one shard per rank), blocks and tiles, for the kernels.

A parameter of ``numel`` elements is seen as ``rows`` rows of ``blocks_per_row`` blocks of
``block`` elements; row ``r`` is what rank ``r`` reduces. The cut depends on the parameter alone and
not on the bucket it travels in, because DDP moves parameters between buckets after the first
backward: the same blocks and the same owners before and after mean the same bits. Tiles are views
of the tensor where that is possible.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lightning_dist.base.private import copy_all
from lightning_dist.codecs.base import BlockCodec, Payload
from lightning_dist.codecs.noise import block_keys


@dataclass(frozen=True)
class Grid:
    """A flat tensor as ``(rows, blocks_per_row, block)``; the last rows may be partly empty."""

    numel: int
    rows: int
    block: int

    @property
    def blocks_per_row(self) -> int:
        blocks = -(-self.numel // self.block)
        return -(-blocks // self.rows)

    @property
    def full_columns(self) -> int:
        """Leading block columns in which every row is filled: these need no staging copy."""
        return max(0, self.numel // self.block - (self.rows - 1) * self.blocks_per_row)

    def spans(self, most_blocks: int) -> Iterator[BlockColumns]:
        """Cut the columns into spans of at most ``most_blocks`` blocks over all rows."""
        columns = max(1, most_blocks // self.rows)
        full = self.full_columns
        for first in range(0, full, columns):
            yield BlockColumns(self, first, min(first + columns, full), direct=True)
        for first in range(full, self.blocks_per_row, columns):
            yield BlockColumns(self, first, min(first + columns, self.blocks_per_row), direct=False)


@dataclass(frozen=True)
class BlockColumns:
    """Block columns ``first`` to ``last`` (exclusive) of a grid."""

    grid: Grid
    first: int
    last: int
    direct: bool  # every row filled: can be viewed in place

    @property
    def columns(self) -> int:
        return self.last - self.first

    def filled(self) -> Iterator[tuple[int, int, int]]:
        """``(row, start, length)`` in elements of the flat tensor, for every row that has any."""
        for row in range(self.grid.rows):
            start = (row * self.grid.blocks_per_row + self.first) * self.grid.block
            end = min(start + self.columns * self.grid.block, self.grid.numel)
            if end > start:
                yield row, start, end - start

    def numbers(self, device: torch.device) -> Tensor:
        """``(rows, columns, 1)`` int32: the number of every block in the flat tensor."""
        rows = torch.arange(self.grid.rows, dtype=torch.int32, device=device)
        columns = torch.arange(self.first, self.last, dtype=torch.int32, device=device)
        return (rows.view(-1, 1) * self.grid.blocks_per_row + columns).unsqueeze(-1)


@dataclass
class Tile:
    """Views of one parameter's part of a unit; ``staged`` where rows are not filled."""

    name: str
    grad: Tensor  # (rows, blocks, block)
    state: tuple[Tensor, ...]  # as the memory says, each like grad
    columns: slice  # blocks of the unit's payload
    # (rows, blocks, 1) int32, of stochastic codecs: which block of its parameter each one is.
    numbers: Tensor = field(default_factory=partial(torch.empty, 0))
    staged: Sequence[tuple[Tensor, Tensor]] = ()  # (where it lives, its place in the staging copy)

    def load(self) -> None:
        if self.staged:
            for copy in (self.grad, *self.state):
                copy.zero_()
            copy_all([copy for _, copy in self.staged], [at for at, _ in self.staged])

    def store(self) -> None:
        if self.staged:
            copy_all([at for at, _ in self.staged], [copy for _, copy in self.staged])


def tile_of(
    name: str,
    flats: Sequence[Tensor],
    span: BlockColumns,
    *,
    columns: slice,
    numbered: bool = False,
) -> Tile:
    """``span`` of a gradient and its state, the ``flats``, as ``columns`` of a payload."""
    grid, staged = span.grid, list[tuple[Tensor, Tensor]]()
    numbers = span.numbers(flats[0].device) if numbered else flats[0].new_empty(0)
    shape = grid.rows, span.columns, grid.block
    if span.direct:
        strides, first = (grid.blocks_per_row * grid.block, grid.block, 1), span.first * grid.block
        places = [flat.as_strided(shape, strides, flat.storage_offset() + first) for flat in flats]
    else:
        places = [flat.new_zeros(shape) for flat in flats]
        staged = [
            (flat[start : start + length], place[row].view(-1)[:length])
            for flat, place in zip(flats, places, strict=True)
            for row, start, length in span.filled()
        ]
    return Tile(name, places[0], tuple(places[1:]), columns, numbers, staged)


def joined(name: str, parts: Sequence[Sequence[Tensor]], *, rows: int, start: int) -> Tile:
    """One staged tile of single elements, from the column ``start`` of a payload on.

    ``parts``: flat gradients and their states, which follow each other.
    """
    numel = sum(len(part[0]) for part in parts)
    columns = -(-numel // rows)
    places: list[Tensor] = []
    staged: list[tuple[Tensor, Tensor]] = []
    for flats in zip(*parts, strict=True):  # the gradients of all parts, then each kind of state
        place = flats[0].new_zeros((rows, columns, 1))
        copies = place.view(-1)[:numel].split([len(flat) for flat in flats])
        staged += zip(flats, copies, strict=True)
        places.append(place)
    at = slice(start, start + columns)
    return Tile(name, places[0], tuple(places[1:]), at, staged=staged)


def columns_of(payload: Payload, columns: slice) -> Payload:
    """``columns`` of every plane."""
    return tuple(plane[:, columns] for plane in payload)


class UnitKeys:
    """Keys of stochastic codecs: ``encode (rows, B, 1)`` for what this rank sends, ``reduce (1, B,
    1)`` for the mean that it rounds.

    A key depends on the codec (and its seed), the step, the parameter, the block in it and the
    rank; on nothing that a bucket layout, a restart or a kernel's cut could change.
    """

    def __init__(self, codec: BlockCodec, tiles: Sequence[Tile], *, rank: int) -> None:
        self._codec, self._tiles, self._rank = codec, tiles, rank
        rows, blocks = len(tiles[0].numbers), tiles[-1].columns.stop
        device = tiles[0].numbers.device
        self.encode = torch.zeros(rows, blocks, 1, dtype=torch.int32, device=device)
        self.reduce = torch.zeros(1, blocks, 1, dtype=torch.int32, device=device)

    def draw(self, step: int) -> None:
        """New keys for ``step``."""
        names = [tile.name for tile in self._tiles]
        salts = unit_salts(self._codec, names, step=step, rank=self._rank).T.tolist()
        for tile, (sent, mean) in zip(self._tiles, salts, strict=True):
            self.encode[:, tile.columns] = block_keys(tile.numbers, sent)
            if len(tile.numbers) > 1:  # this rank owns a row and rounds its mean
                row = tile.numbers[self._rank : self._rank + 1]
                self.reduce[:, tile.columns] = block_keys(row, mean)


def unit_salts(codec: BlockCodec, names: Sequence[str], *, step: int, rank: int) -> Tensor:
    """int32 ``(2, names)`` on the host, with which the keys of :class:`UnitKeys` are hashed.

    The first row is for what this rank sends, the second for the means that it rounds.
    """
    whose = ("all" if codec.shared_keys else str(rank)), "mean"
    salts = [
        [zlib.crc32(f"{codec!r} {step} {name} {who}".encode()) for name in names] for who in whose
    ]
    return torch.tensor(salts, dtype=torch.int64, device="cpu").to(torch.int32)
