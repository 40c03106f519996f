"""Buckets for the kernels, and the eager passes over them, slice by slice; and their device.

It is the CPU, in Triton's interpreter, or with ``-m gpu`` a GPU.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lightning_dist.codecs import BlockCodec, Payload
from lightning_dist.codecs.memory import ErrorFeedback, NoMemory
from lightning_dist.codecs.noise import block_keys
from lightning_dist.exchange.rounds import row_bytes, views
from lightning_dist.kernels.passes import Factors, Passes
from lightning_dist.kernels.triton import Slice
from lightning_dist.reducer.units.tiles import BlockColumns, Grid, Tile, columns_of, tile_of

DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
on_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
] * (DEVICE.type == "cuda")
"""Marks of tests on it."""
CODECS = ["int8", "int4", "fp8", "sign", "qsgd:norm=l2", "terngrad:clip_sigma=2.5", "none"]
"""Codecs with other kernels than those of the codecs before them."""


def laid_out(*sizes: int, gap: int = 0) -> list[Slice]:
    """Slices of ``sizes``, ``gap`` elements apart in the gradient, in another order in memory."""
    slices: list[Slice] = []
    offset, memory = gap, sum(sizes)
    for numel in sizes:
        memory -= numel
        slices.append(Slice(offset, numel, memory))
        offset += numel + gap
    return slices


def span_of(slices: Sequence[Slice]) -> int:
    return max(part.offset + part.numel for part in slices)


@dataclass(frozen=True)
class Eager:
    """The passes of ``kernels/passes.py`` on the tensors that the kernels take."""

    codec: BlockCodec
    slices: Sequence[Slice]
    rows: int

    @property
    def columns(self) -> int:
        return sum(self._grid(part).blocks_per_row for part in self.slices)

    def encode(
        self, flat: Tensor, residual: Tensor | None, scale: Tensor, salts: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Payload, new residual (of finite blocks), and which blocks are finite."""
        own = residual is None
        passes = Passes(self.codec, NoMemory() if own else ErrorFeedback(), Factors(), self.rows)
        buffer = self._buffer(self.rows)
        payload = self._views(buffer)
        finite = payload[0].new_zeros(payload[0].shape, dtype=torch.bool)
        new = None if residual is None else residual.clone()
        for i, (tile, columns) in enumerate(self._tiles(flat, new)):
            out = columns_of(payload, columns)
            keys = self._keys(i, columns, salts)
            passes.encode(tile.grad, tile.state, scale, keys, out)
            finite[:, columns] = good = out[0].isfinite()
            if residual is not None:
                compensated = passes.memory.compensated(tile.grad.float(), tile.state, scale)
                sent = passes.decoded(out, torch.float32, keys)
                (after,) = passes.memory.after(
                    tile.grad.float(), compensated, sent, tile.state, scale
                )
                tile.state[0].copy_(torch.where(good & after.isfinite(), after, tile.state[0]))
                tile.store()
        return buffer, new, finite

    def reduce(self, shards: Tensor, row: int, salts: Tensor | None) -> Tensor:
        passes = Passes(self.codec, NoMemory(), Factors(), len(shards))
        mean = self._buffer(1)
        for i, columns in enumerate(self._columns()):
            keys = self._keys(i, columns, salts)
            passes.reduce(
                columns_of(self._views(shards), columns),
                None if keys is None else keys[row : row + 1],
                columns_of(self._views(mean), columns),
            )
        return mean

    def server_feedback(
        self, residual: Tensor, scale: Tensor, shards: Tensor, mean: Tensor, row: int
    ) -> Tensor:
        """The new residual: in the places of ``row``, where the mean's block is finite."""
        passes = Passes(self.codec, ErrorFeedback(), Factors(), len(shards))
        new = residual.clone()
        for tile, columns in self._tiles(torch.zeros(span_of(self.slices)), new):
            (state,) = tile.state
            of_mean = columns_of(self._views(mean), columns)
            before = state[row : row + 1].clone()
            passes.server_feedback(
                state[row : row + 1],
                scale,
                columns_of(self._views(shards), columns),
                of_mean,
            )
            good = of_mean[0].isfinite()
            state[row : row + 1] = torch.where(good, state[row : row + 1], before)
            tile.store()
        return new

    def decode(self, payloads: Tensor, flat: Tensor, weight: float) -> Tensor:
        """``payloads (count * rows, row_bytes)``; the new gradient."""
        count = len(payloads) // self.rows
        passes = Passes(self.codec, NoMemory(), Factors(mean=weight), self.rows)
        new = flat.clone()
        for tile, columns in self._tiles(new, None):
            received = [columns_of(self._views(part), columns) for part in payloads.chunk(count)]
            passes.decode_and_commit(tile.grad, (), torch.ones(()), None, received[0], received)
            tile.store()
        return new

    def _grid(self, part: Slice) -> Grid:
        return Grid(part.numel, self.rows, self.codec.block)

    def _columns(self) -> list[slice]:
        ends = [0]
        for part in self.slices:
            ends.append(ends[-1] + self._grid(part).blocks_per_row)
        return [slice(a, b) for a, b in pairwise(ends)]

    def _tiles(self, flat: Tensor, residual: Tensor | None) -> list[tuple[Tile, slice]]:
        tiles = []
        for part, columns in zip(self.slices, self._columns(), strict=True):
            flats = [flat[part.offset : part.offset + part.numel]]
            if residual is not None:
                flats.append(residual[part.memory : part.memory + part.numel])
            grid = self._grid(part)
            span = BlockColumns(grid, 0, grid.blocks_per_row, direct=False)
            tile = tile_of("", flats, span, columns=columns)
            tile.load()
            tiles.append((tile, columns))
        return tiles

    def _keys(self, i: int, columns: slice, salts: Tensor | None) -> Tensor | None:
        if salts is None:
            return None
        grid = self._grid(self.slices[i])
        numbers = BlockColumns(grid, 0, grid.blocks_per_row, direct=False).numbers(salts.device)
        return block_keys(numbers, int(salts[i]))

    def _buffer(self, rows: int) -> Tensor:
        size = row_bytes(self.codec.planes(torch.float32), self.columns)
        return torch.zeros(rows, size, dtype=torch.uint8)

    def _views(self, buffer: Tensor) -> Payload:
        return views(buffer, self.codec.planes(torch.float32), self.columns)


def bits(x: Tensor) -> Tensor:
    """As integers, every NaN as the same one."""
    if not x.is_floating_point():
        return x
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    return torch.where(x.isnan(), torch.full((), torch.nan, dtype=x.dtype), x).view(integers)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a.cpu()), bits(b.cpu()))


def same_payload(eager: Eager, a: Tensor, b: Tensor) -> bool:
    """Scales, codes of finite blocks, and the padding."""
    codec, columns = eager.codec, eager.columns
    (scales, codes), (other_scales, other_codes) = (
        views(x.cpu().clone(), codec.planes(torch.float32), columns) for x in (a, b)
    )
    good = scales.isfinite()
    padding = [x.cpu().clone() for x in (a, b)]
    for x in padding:
        for plane in views(x, codec.planes(torch.float32), columns):
            plane.zero_()
    return (
        same(scales, other_scales)
        and torch.equal(torch.where(good, codes, 0), torch.where(good, other_codes, 0))
        and torch.equal(*padding)
    )


def hard_numbers(numel: int, *, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of very different sizes, among them zeros and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    size = torch.randint(-140, 20, (-(-numel // 100),), generator=generator)
    x = x * (2.0 ** size.double()).float().repeat_interleave(100)[:numel]
    x[torch.rand(numel, generator=generator) < 0.05] = 0.0
    return x.clamp(-6e4, 6e4).to(dtype)
