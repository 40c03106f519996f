"""The table of tiles over which one kernel launch walks all slices of a bucket.

A slice of ``numel`` elements is seen as ``rows`` rows of ``blocks_per_row`` blocks of ``block``
elements, as in :class:`lightning_dist.reducer.units.tiles.Grid`; the last rows may be partly empty.
A tile is a run of blocks of one row of one slice, and the work of one program of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec
from lightning_dist.exchange.rounds import row_bytes

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Gradients that the kernels take. Those in float64 need arithmetic in float64: they stay eager."""

FIELDS = 10
"""Columns of the table: places in ``flat`` and in the residual memory, elements that exist, blocks,
bytes of the payload before the row (divided by 8), of the row before the scales, of the row before
the codes (divided by ``TileShape.code_alignment``), number of the first block in its slice, number
of the slice; one is spare, so that every tile begins at a multiple of 16 bytes. Divided, because a
compiler sees from a multiplication how wide a load may be."""

ALIGNMENTS = (16, 4, 1)
"""Kinds of kernels, by the elements that divide all places and lengths; all are compiled at set-up.
Four elements of float32 are the widest word that a GPU loads."""

_TILE_ELEMENTS = 4096
_INTERPRETED_TILE_ELEMENTS = 1 << 16  # numpy works on whole tiles, Python pays for each of them
_MOST_ROWS = 8
"""Rows of a payload, of which one has tiles enough for all processors of a GPU: 200 in 25 MB."""


@dataclass(frozen=True)
class TileShape:
    """Constants of the kernels: a tile is ``blocks`` blocks of ``block`` elements.

    ``parts`` codes share a byte, and a block has ``real`` bytes of them. Sizes of Triton's tensors
    are powers of two, so ``width`` bytes are held.
    """

    block: int
    blocks: int
    parts: int
    real: int
    alignment: int  # elements that divide the place and the length of every slice
    code_alignment: int  # bytes that divide the place of every block's codes
    levels: float = 0  # of the codec
    option: float = 0
    raw: Any = None  # Triton's dtype of payloads that are the elements themselves
    raw_is_bfloat16: bool = False  # as int16

    @property
    def width(self) -> int:
        return 1 << (self.real - 1).bit_length()

    @property
    def bits(self) -> int:
        return 8 // self.parts

    @property
    def mask(self) -> int:
        """The bits of a code that travel."""
        return 255 >> (8 - self.bits)


@dataclass(frozen=True)
class Slice:
    """A tensor within a flat gradient, and where the residual memory has its residual."""

    offset: int  # elements of the flat gradient before it
    numel: int
    memory: int = 0  # elements of the residual memory before it


def packed(runs: Sequence[tuple[int, int]], *, rows: int, columns: int) -> list[list[Slice]]:
    """Runs ``(offset, elements)`` one after the other, cut into ``rows`` of so many elements."""
    slices: list[list[Slice]] = [[] for _ in range(rows)]
    before = 0
    for offset, numel in runs:
        start = 0
        while start < numel:
            row, column = divmod(before + start, columns)
            length = min(numel - start, columns - column)
            slices[row].append(Slice(offset + start, length))
            start += length
        before += numel
    return slices


@dataclass(frozen=True)
class SliceTable:
    """Tiles of one codec over the slices of one flat gradient; built once for each bucket.

    Row ``r`` of a payload begins ``payload_starts[r]`` bytes into the payload and is made by the
    tiles ``tile_starts[r]`` to ``tile_starts[r + 1]``.
    """

    tiles: Tensor  # (tiles, FIELDS) int64
    tile_starts: tuple[int, ...]  # rows + 1
    payload_starts: tuple[int, ...]  # rows + 1
    shape: TileShape
    finer: SliceTable | None = None  # for passes over one of many rows: with smaller tiles

    @property
    def rows(self) -> int:
        return len(self.tile_starts) - 1

    @property
    def nbytes(self) -> int:
        """Bytes that the table itself holds."""
        return self.tiles.nbytes + (0 if self.finer is None else self.finer.nbytes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload of all rows."""
        return self.payload_starts[-1]

    def row_bytes(self, row: int) -> int:
        return self.payload_starts[row + 1] - self.payload_starts[row]

    @classmethod
    def of(
        cls,
        codec: BlockCodec,
        groups: Sequence[Sequence[Slice]],
        *,
        rows: int = 1,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        sizes: Sequence[int] | None = None,
        before: Sequence[int] | None = None,
        tile_elements: int | None = None,
    ) -> SliceTable:
        """Every slice of a group, cut into ``rows`` rows of equal length.

        One group of W rows is what a two-shot exchange of W ranks sends, where rank ``r`` reduces
        row ``r``, and one of one row what ranks gather. Groups of one row are packed slices. The
        rows of a payload follow each other without a gap.

        Args:
            dtype: of gradients; payloads that are not compressed are in it.
            sizes: bytes of every row, of which the slices may be a part; None: they are all of it.
            before: bytes of every row before the slices; None: 0.
        """
        if tile_elements is None:
            tile_elements = _INTERPRETED_TILE_ELEMENTS if device.type == "cpu" else _TILE_ELEMENTS
        tables = [
            _cut(codec, groups, rows, device, dtype, sizes, before, elements)
            for elements in (tile_elements, tile_elements * _MOST_ROWS // max(rows, _MOST_ROWS))
        ]
        table, finer = tables
        return table if finer.shape == table.shape else replace(table, finer=finer)


def _cut(
    codec: BlockCodec,
    groups: Sequence[Sequence[Slice]],
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[int] | None,
    before: Sequence[int] | None,
    tile_elements: int,
) -> SliceTable:
    """:meth:`SliceTable.of` with tiles of so many elements, or of one block."""
    planes = codec.planes(dtype)
    *scales, codes = planes
    bytes_of_codes = codes.bytes_per_block
    parts, real = 1, 1
    if scales:
        assert scales[0].bytes_per_block == 2, "kernels write one bfloat16 scale a block"
        parts, real = codec.block // bytes_of_codes, bytes_of_codes
    elements = parts << (real - 1).bit_length()
    per_tile = 1 << (max(1, tile_elements // elements).bit_length() - 1)
    parts_of_all = [part for group in groups for part in group]
    places = [n for p in parts_of_all for n in (p.offset, p.memory, p.numel)]
    if rows > 1:  # which begin at multiples of so many elements
        places += [-(-p.numel // (rows * codec.block)) * codec.block for p in parts_of_all]
    divisor = math.gcd(16, *places)
    alignment = next(elements for elements in ALIGNMENTS if divisor % elements == 0)
    # Planes begin at multiples of 8; blocks of single elements at those of slices.
    code_alignment = math.gcd(8, bytes_of_codes if scales else bytes_of_codes * alignment)
    shape = TileShape(codec.block, per_tile, parts, real, alignment, code_alignment)

    tiles: list[Tensor] = []
    tile_starts, payload_starts, number_of_slice = [0], [0], 0
    for group in groups:
        counts = [-(-part.numel // (rows * codec.block)) for part in group]
        columns, group_row = sum(counts), len(payload_starts) - 1
        size = row_bytes(planes, columns) if sizes is None else sizes[group_row]
        at = 0 if before is None else before[group_row]
        before_codes = row_bytes(scales, columns)
        first = 0
        of_slices = [torch.empty(rows, 0, FIELDS, dtype=torch.int64)]
        for part, count in zip(group, counts, strict=True):
            row = torch.arange(rows).view(-1, 1)
            column = torch.arange(0, count, per_tile).view(1, -1)
            number = row * count + column
            start = number * codec.block
            length = (count - column).clamp(max=per_tile)
            fields = (
                part.offset + start,
                part.memory + start,
                torch.minimum(part.numel - start, length * codec.block).clamp(min=0),
                length,
                (payload_starts[-1] + row * size) // 8,
                at + (first + column) * 2,
                (at + before_codes + (first + column) * bytes_of_codes) // code_alignment,
                number,
                torch.tensor(number_of_slice),
                torch.tensor(0),
            )
            of_slices.append(torch.stack([f.expand(number.shape) for f in fields], dim=-1))
            first += count
            number_of_slice += 1
        for of_row in torch.cat(of_slices, dim=1):
            tiles.append(of_row)
            tile_starts.append(tile_starts[-1] + len(of_row))
            payload_starts.append(payload_starts[-1] + size)
    every_tile = torch.cat(tiles).to(device)
    return SliceTable(every_tile, tuple(tile_starts), tuple(payload_starts), shape)
