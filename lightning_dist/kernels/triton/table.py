"""The table of tiles over which one kernel launch walks all slices of a bucket.

A slice of ``numel`` elements is seen as ``rows`` rows of ``blocks_per_row`` blocks of ``block``
elements, as in :class:`lightning_dist.reducer.tiles.Grid`; the last rows may be partly empty. A
tile is a run of blocks of one row of one slice, and the work of one program of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec
from lightning_dist.exchange.wire import row_bytes

FIELDS = 10
"""Columns of the table: places in ``flat`` and in the residual memory, elements that exist, blocks,
bytes of the payload before the row (divided by 8), of the row before the scales, of the row before
the codes (divided by ``BlockShape.alignment``), number of the first block in its slice, number of
the slice; one is spare, so that every tile begins at a multiple of 16 bytes. Divided, because a
compiler sees from a multiplication how wide a load may be."""

_TILE_ELEMENTS = 4096
_INTERPRETED_TILE_ELEMENTS = 1 << 16  # numpy works on whole tiles, Python pays for each of them


@dataclass(frozen=True)
class BlockShape:
    """A block as kernels hold it: ``parts`` codes share a byte, and there are ``real`` bytes.

    Sizes of Triton's tensors are powers of two, so ``width`` bytes are held.
    """

    parts: int
    real: int

    @classmethod
    def of(cls, codec: BlockCodec) -> BlockShape:
        scales, codes = codec.planes(torch.float32)
        assert scales.bytes_per_block == 2, "kernels write one bfloat16 scale a block"
        return cls(codec.block // codes.bytes_per_block, codes.bytes_per_block)

    @property
    def width(self) -> int:
        return 1 << (self.real - 1).bit_length()

    @property
    def elements(self) -> int:
        return self.parts * self.width

    @property
    def alignment(self) -> int:
        """Bytes that divide the place of every block's codes: planes begin at multiples of 8."""
        return math.gcd(8, self.real)


@dataclass(frozen=True)
class Slice:
    """A tensor within a flat gradient, and where the residual memory has its residual."""

    name: str
    offset: int  # elements of the flat gradient before it
    numel: int
    memory: int = 0  # elements of the residual memory before it


@dataclass(frozen=True)
class Within:
    """Rows of a payload that are parts of the rows of a larger one."""

    row_bytes: Sequence[int]  # of every row, all of it
    before: Sequence[int]  # of every row, behind so many bytes of it


@dataclass(frozen=True)
class SliceTable:
    """Tiles of one codec over the slices of one flat gradient; built once for each bucket.

    Row ``r`` of a payload begins ``payload_starts[r]`` bytes into the payload and is made by the
    tiles ``tile_starts[r]`` to ``tile_starts[r + 1]``.
    """

    tiles: Tensor  # (tiles, FIELDS) int64
    tile_starts: tuple[int, ...]  # rows + 1
    payload_starts: tuple[int, ...]  # rows + 1
    columns: tuple[int, ...]  # blocks of every row
    block: int
    blocks_per_tile: int
    alignment: int  # elements that divide every place and every length

    @property
    def rows(self) -> int:
        return len(self.columns)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload of all rows."""
        return self.payload_starts[-1]

    def row_bytes(self, row: int) -> int:
        return self.payload_starts[row + 1] - self.payload_starts[row]

    @classmethod
    def of_rows(
        cls,
        codec: BlockCodec,
        slices: Sequence[Slice],
        *,
        rows: int,
        device: torch.device,
        within: Within | None = None,
        tile_elements: int | None = None,
    ) -> SliceTable:
        """Every slice cut into ``rows`` rows of equal length: row ``r`` is what rank ``r`` reduces.

        Payloads are ``(rows, row_bytes)``, as :class:`~lightning_dist.exchange.rounds.TwoShot` and
        (one row) :class:`~lightning_dist.exchange.rounds.AllGather` send them.
        """
        return _table(codec, [list(slices)], rows, device, tile_elements, None, within)

    @classmethod
    def of_shares(
        cls,
        codec: BlockCodec,
        shares: Sequence[Sequence[Slice]],
        *,
        blocks: Sequence[int] | None = None,
        device: torch.device,
        within: Within | None = None,
        tile_elements: int | None = None,
    ) -> SliceTable:
        """Row ``r`` has the slices of ``shares[r]`` as they are, perhaps none, and ``blocks[r]``.

        Rows follow each other without a gap, as in
        :class:`~lightning_dist.exchange.rounds.ReduceScatterAllGather`.
        """
        groups = [list(share) for share in shares]
        return _table(codec, groups, 1, device, tile_elements, blocks, within)


def _table(
    codec: BlockCodec,
    groups: Sequence[Sequence[Slice]],
    rows: int,
    device: torch.device,
    tile_elements: int | None,
    blocks_of_groups: Sequence[int] | None,
    within: Within | None,
) -> SliceTable:
    planes, shape = codec.planes(torch.float32), BlockShape.of(codec)
    if tile_elements is None:
        tile_elements = _INTERPRETED_TILE_ELEMENTS if device.type == "cpu" else _TILE_ELEMENTS
    per_tile = max(1, tile_elements // shape.elements)
    per_tile = 1 << (per_tile.bit_length() - 1)

    tiles: list[Tensor] = []
    tile_starts, payload_starts, columns, slices = [0], [0], list[int](), 0
    for i, group in enumerate(groups):
        counts = [-(-part.numel // (rows * codec.block)) for part in group]
        blocks = sum(counts) if blocks_of_groups is None else blocks_of_groups[i]
        size = row_bytes(planes, blocks)
        codes = size - row_bytes(planes[1:], blocks)  # bytes of a row before its codes
        at = 0
        if within is not None:
            size, at = within.row_bytes[len(columns)], within.before[len(columns)]
        first = 0
        parts = [torch.empty(rows, 0, FIELDS, dtype=torch.int64)]
        for part, count in zip(group, counts, strict=True):
            row = torch.arange(rows).view(-1, 1)
            column = torch.arange(0, count, per_tile).view(1, -1)
            number = row * count + column
            start = number * codec.block
            length = (count - column).clamp(max=per_tile)
            before = payload_starts[-1] + row * size
            fields = (
                part.offset + start,
                part.memory + start,
                torch.minimum(part.numel - start, length * codec.block).clamp(min=0),
                length,
                before // 8,
                at + (first + column) * 2,
                (at + codes + (first + column) * shape.real) // shape.alignment,
                number,
                torch.tensor(slices),
                torch.tensor(0),
            )
            parts.append(torch.stack([field.expand(number.shape) for field in fields], dim=-1))
            first += count
            slices += 1
        of_group = torch.cat(parts, dim=1)
        for of_row in of_group:
            tiles.append(of_row)
            tile_starts.append(tile_starts[-1] + len(of_row))
            payload_starts.append(payload_starts[-1] + size)
            columns.append(blocks)
    every = [number for group in groups for p in group for number in (p.offset, p.memory, p.numel)]
    return SliceTable(
        tiles=torch.cat(tiles).to(device),
        tile_starts=tuple(tile_starts),
        payload_starts=tuple(payload_starts),
        columns=tuple(columns),
        block=codec.block,
        blocks_per_tile=per_tile,
        # Two kinds of kernels, both compiled at set-up, and not one for every power of two.
        alignment=16 if math.gcd(16, *every) == 16 else 1,
    )
