"""How a flat gradient is cut into rows (one shard a rank), blocks and tiles. Arithmetic only.

A parameter of ``numel`` elements is seen as ``rows`` rows of ``blocks_per_row`` blocks of
``block`` elements; row ``r`` is what rank ``r`` reduces. The cut depends on the parameter alone and
not on the bucket it travels in, because DDP moves parameters between buckets after the first
backward: the same blocks and the same owners before and after mean the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


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

    def spans(self, most_blocks: int) -> Iterator[Span]:
        """Cut the columns into spans of at most ``most_blocks`` blocks over all rows."""
        columns = max(1, most_blocks // self.rows)
        full = self.full_columns
        for first in range(0, full, columns):
            yield Span(self, first, min(first + columns, full), direct=True)
        for first in range(full, self.blocks_per_row, columns):
            yield Span(self, first, min(first + columns, self.blocks_per_row), direct=False)


@dataclass(frozen=True)
class Span:
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
