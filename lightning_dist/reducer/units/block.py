"""Units of block codecs: tiles of gradients, their exchange and their kernels.

Units overlap: on gloo one large all_to_all reaches 59 % of the link, eight asynchronous ones 96 %,
and one unit is encoded while another travels. On an accelerator a unit is a whole bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from typing_extensions import override

from lightning_dist.base.exchanges import EXCHANGES
from lightning_dist.reducer.plan.block import BlockPlan, key_name
from lightning_dist.reducer.plan.slices import ParameterSlice, neighbours
from lightning_dist.reducer.units.base import CommUnit
from lightning_dist.reducer.units.sizes import unit_elements
from lightning_dist.reducer.units.tiles import (
    Grid,
    Tile,
    UnitKeys,
    columns_of,
    joined,
    tile_of,
)


class BlockUnit(CommUnit):
    """Tiles that travel together."""

    def __init__(self, plan: BlockPlan, tiles: Sequence[Tile]) -> None:
        self.tiles, self.kernels, self._plan = tiles, plan.kernels, plan
        stochastic = plan.codec.stochastic
        self._keys = UnitKeys(plan.codec, tiles, rank=plan.network.rank) if stochastic else None
        whole = plan.codec.lossless and len(tiles) == 1
        self.exchange, self._section = plan.exchange(
            tiles[-1].columns.stop, in_place=tiles[0].grad if whole else None
        )
        section = self._section
        self._own = [columns_of(section.own, tile.columns) for tile in tiles]
        self._payloads = [
            tuple(columns_of(payload, tile.columns) for payload in section.payloads)
            for tile in tiles
        ]
        # An exchange on the bucket's own memory needs no decoding back into it.
        in_place = section.payloads[0][0].data_ptr() == tiles[0].grad.data_ptr()
        self._in_place = in_place and self.kernels.passes.factors.divisor == 1

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        if self._keys is not None:
            self._keys.draw(step)
        now = self._plan.immediate and bool(self.kernels.memory.kinds)
        encode = self.kernels.encode_and_commit if now else self.kernels.encode
        for tile, own in zip(self.tiles, self._own, strict=True):
            tile.load()
            encode(tile.grad, tile.state, scale, _keys_of(tile, self._keys), own)
            if now:
                tile.store()

    @override
    def finite(self) -> Tensor:
        return self.kernels.codec.finite(self._section.own)

    @override
    def start_second(self) -> None:
        if self._section.mean:
            self.exchange.wait()
            (shards,), keys = self._section.received, self._keys
            self.kernels.reduce(shards, None if keys is None else keys.reduce, self._section.mean)
        self.exchange.start_second()

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        self.wait()
        if self._in_place:
            return
        for tile, own, payloads in zip(self.tiles, self._own, self._payloads, strict=True):
            keys = _keys_of(tile, self._keys)
            state = () if self._plan.immediate else tile.state
            self.kernels.decode_and_commit(tile.grad, state, scale, keys, own, payloads)
            if "residual" in self.kernels.memory.kinds and self._section.mean:
                shards = columns_of(self._section.received[0], tile.columns)
                mean = columns_of(self._section.mean, tile.columns)
                rank = self._plan.network.rank
                row = tile.state[0][rank : rank + 1]
                self.kernels.server_feedback(row, scale, shards, mean)
            tile.store()


def _keys_of(tile: Tile, keys: UnitKeys | None) -> Tensor | None:
    return None if keys is None else keys.encode[:, tile.columns]


def tiles_of(
    plan: BlockPlan, slices: Sequence[ParameterSlice], bucket: Tensor
) -> Iterator[list[Tile]]:
    """Tiles of ``slices``, those of a unit together."""
    rows, codec = plan.rows, plan.codec
    kind = EXCHANGES[codec.exchange]
    sparse = codec.wire_bytes(codec.block) / codec.block if kind.sparse else 0.0
    most = unit_elements(rows, sparse=sparse, whole=plan.network.whole_buckets)
    limit = max(1, most // codec.block)  # blocks of a unit
    if kind.linear:
        limit = bucket.numel()  # a ring's additions depend on positions: as DDP, one a bucket
    tiles: list[Tile] = []
    columns = 0
    # Blocks and state belong to one parameter; without them neighbours are one tile.
    separate = codec.block > 1 or bool(plan.kernels.memory.kinds)
    # Uncompressed elements may lie anywhere: the last of all runs share their padding.
    together = rows > 1 and codec.lossless and codec.block == 1
    tails: list[Sequence[Tensor]] = []
    for run in [[part] for part in slices] if separate else neighbours(slices):
        first, numel = run[0], sum(part.numel for part in run)
        flats = [bucket[first.offset : first.offset + numel], *plan.state_of(first)]
        if together and (tail := numel % rows):
            tails.append([flat[numel - tail :] for flat in flats])
            numel -= tail
        for span in Grid(numel, rows, codec.block).spans(limit):
            if tiles and (columns + span.columns) * rows > limit:
                yield tiles
                tiles, columns = [], 0
            at = slice(columns, columns + span.columns)
            tile = tile_of(key_name(first), flats, span, columns=at, numbered=codec.stochastic)
            tiles.append(tile)
            columns += span.columns
    if tails:
        tiles.append(joined("uncompressed", tails, rows=rows, start=columns))
    if tiles:
        yield tiles
