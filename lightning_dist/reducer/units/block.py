"""Units of block codecs, flat and in levels.

Units overlap: on gloo one large all_to_all reaches 59 % of the link, eight asynchronous ones 96 %,
and one unit is encoded while another travels. On an accelerator a unit is a whole bucket.

A hierarchical unit is reduced inside a node before it crosses to the others::

    bucket -> all_to_all inside -> mean of the node's ranks, on this rank's share
           -> any unit, between nodes -> mean of all
           -> all_gather inside -> bucket

The units between nodes are those of a flat exchange, on the share instead of the bucket, among one
rank of each node. So state belongs to a share and not to a rank's whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.base.exchanges import EXCHANGES, unit_elements
from lightning_dist.base.private import copy_all
from lightning_dist.codecs.base import Codec
from lightning_dist.exchange.rounds import RowExchange, TwoShot, row_bytes
from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.ranks.traffic import Sent
from lightning_dist.reducer.plan.flat import BlockPlan, key_name
from lightning_dist.reducer.plan.intra import IntraPlan, Owned, share_dtype
from lightning_dist.reducer.plan.slices import ParameterSlice, neighbours
from lightning_dist.reducer.units.base import CommUnit, JoinedUnit, decode_all, staggered
from lightning_dist.reducer.units.by_codec import flat_units
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


class HierarchicalUnit(JoinedUnit):
    """Parts of one bucket.

    Args:
        codec: between nodes.
        owned: the parts, by the rank of the node that owns them.
    """

    exchange: TwoShot

    def __init__(self, plan: IntraPlan, codec: Codec, owned: Owned, bucket: Tensor) -> None:
        self._plan, self._bucket, self._owned = plan, bucket, owned
        world, (plane,) = plan.intra.topology.world_size, plan.codec.planes(bucket.dtype)
        self._dtype = plane.dtype
        self._sizes = [sum(part.numel for part in parts) for parts in owned]
        sent = [max(self._sizes)] * world if plan.padded else self._sizes
        self.row_bytes = [row_bytes([plane], size) for size in sent]
        slices = _one_after_the_other(owned[plan.intra.topology.rank])
        wide = share_dtype(codec, bucket.dtype)
        self._share = bucket.new_zeros(sum(part.numel for part in slices), dtype=wide)
        self._inter: Sequence[CommUnit] = ()
        if slices and plan.inter is not None:
            self._inter = flat_units(codec, slices, self._share, plan.inter)
            self.samples = self._inter[0].samples
        self._true = torch.ones((), dtype=torch.bool, device=bucket.device)

    @override
    def make_exchange(self, row_bytes: Sequence[int]) -> RowExchange:
        intra, memory = self._plan.intra, self._plan.memory
        memory.restart()
        return TwoShot(
            row_bytes,
            channel=intra.data,
            topology=intra.topology,
            device=self._bucket.device,
            allocate=memory.take,
        )

    @override
    def place(self, sizes: Sequence[int], before: Sequence[int]) -> None:
        exchange, rank, dtype = self.exchange, self.exchange.rank, self._dtype

        def view(memory: Tensor, owner: int) -> Tensor:
            start, numel = before[owner], self._sizes[owner]
            if not numel:  # strides of nothing need not fit
                return memory.new_empty((*memory.shape[:-1], 0), dtype=dtype)
            return memory[..., start : start + numel * dtype.itemsize].view(dtype)

        payloads = [view(part, owner) for owner, part in enumerate(exchange.parts)]
        self._mean = payloads[rank]
        self._received = view(exchange.received_bytes, rank)  # (ranks of the node, own share)
        numels = [[part.numel for part in parts] for parts in self._owned]
        # Parts of the bucket, and where they are in the payloads.
        self._flats = [part.of(self._bucket) for parts in self._owned for part in parts]
        pairs = zip(payloads, numels, strict=True)
        self._places = [place for all_, of in pairs for place in all_.split_with_sizes(of)]
        self._sent_inside = exchange.sent_for(self.row_bytes)

    @override
    def begin(self) -> None:
        copy_all(self._places, self._flats)
        if self.last:
            self.exchange.start()

    @override
    def receive(self) -> None:
        self.exchange.wait()
        rows, share, weight = self._received, self._share, self._plan.intra.level.weight
        wide = compute_dtype(share.dtype)
        total = share if share.dtype == wide else torch.empty_like(share, dtype=wide)
        if self._plan.whole_buckets:  # one launch for any number of ranks
            torch.sum(rows, 0, dtype=wide, out=total)
        else:  # in rank order, wherever an element is in the share
            total.copy_(rows[0])
            for row in rows[1:]:
                total.add_(row)
        # By whole numbers: a product with a rounded fraction would round twice.
        if weight.denominator != 1:
            total.div_(weight.denominator)
        if weight.numerator != 1:
            total.mul_(weight.numerator)
        if total is not share:
            share.copy_(total)

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        for unit in staggered(self._inter):
            unit.encode(scale, step=step)

    @override
    def finite(self) -> Tensor:
        if not self._inter:
            return self._true  # the rank that received this one's gradient checks it
        return torch.stack([unit.finite() for unit in self._inter]).all()

    @override
    def start(self) -> None:
        for unit in self._inter:
            unit.start()

    @override
    def start_second(self) -> None:
        for unit in self._inter:
            unit.start_second()

    @override
    def wait(self) -> None:
        self.exchange.wait()
        for unit in self._inter:
            unit.wait()

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        decode_all(self._inter, scale)
        self._mean.copy_(self._share)
        if self.last:
            self.exchange.start_second()

    @override
    def finish(self) -> None:
        self.exchange.wait()
        copy_all(self._flats, self._places)

    @property
    @override
    def sent(self) -> Sent:
        return sum((unit.sent for unit in self._inter), self._sent_inside)

    @property
    @override
    def nbytes(self) -> int:
        return self._share.nbytes + sum(unit.nbytes for unit in self._inter)


def _one_after_the_other(parts: Sequence[ParameterSlice]) -> list[ParameterSlice]:
    """``parts`` as they lie in a tensor of their own."""
    slices, offset = [], 0
    for part in parts:
        slices.append(replace(part, offset=offset))
        offset += part.numel
    return slices
