"""How the parameters of a block codec are cut into units and tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Payload
from lightning_dist.exchange.rounds import AllGather, AllReduce, Exchange, TwoShot
from lightning_dist.kernels.passes import Kernels, compute_dtype
from lightning_dist.reducer.block_unit import BlockUnit
from lightning_dist.reducer.fitting import fitted, rows_of
from lightning_dist.reducer.geometry import Grid, Span
from lightning_dist.reducer.keys import Place, UnitKeys
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.scratch import PayloadMemory
from lightning_dist.reducer.slices import ParameterSlice, neighbours
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.tiles import Tile, joined, tile_of
from lightning_dist.reducer.unit_sizes import unit_elements
from lightning_dist.reducer.units import compile_passes, units_of

if TYPE_CHECKING:
    from lightning_dist.reducer.plan import Planner


@units_of.register(BlockCodec)
def _units(
    codec: BlockCodec, slices: Sequence[ParameterSlice], bucket: Tensor, planner: Planner
) -> list[BlockUnit]:
    ranks, dtype = planner.network.world_size, bucket.dtype
    by_block: dict[BlockCodec, list[ParameterSlice]] = {}
    for part in slices:
        fit = fitted(codec, part.numel, ranks=ranks, dtype=dtype)
        by_block.setdefault(fit, []).append(part)
    plans = [(planner.blocks(fit, dtype), some) for fit, some in by_block.items()]
    return [unit for plan, some in plans for unit in plan.units(some, bucket)]


@compile_passes.register(BlockCodec)
def _compile(codec: BlockCodec, dtypes: Iterable[torch.dtype], planner: Planner) -> None:
    for dtype in dtypes:
        plan = planner.blocks(codec, dtype)
        planner.fuse_kernels(plan.kernels, dtype, rows=plan.rows, received=plan.received)


@dataclass(frozen=True)
class BlockPlan:
    """Units of one codec for gradients of one dtype.

    ``payloads``: memory that tensors take turns with, where state is committed when it is encoded;
    None where everything stays until the step is finished.
    """

    codec: BlockCodec
    kernels: Kernels
    network: Network
    state: ReducerState
    payloads: PayloadMemory | None

    @property
    def rows(self) -> int:
        """One row per rank where each rank reduces a shard, otherwise whole payloads travel."""
        return rows_of(self.codec, self.network.world_size)

    @property
    def received(self) -> int:
        """Payloads that a rank decodes and adds."""
        whole = self.rows == 1 and self.codec.exchange != "allreduce"
        return self.network.world_size if whole else 1

    def units(self, slices: Sequence[ParameterSlice], bucket: Tensor) -> list[BlockUnit]:
        return [self._unit(tiles, bucket.dtype) for tiles in self._tiles(slices, bucket)]

    def _tiles(self, slices: Sequence[ParameterSlice], bucket: Tensor) -> Iterator[list[Tile]]:
        rows, codec = self.rows, self.codec
        sparse = codec.wire_bytes(codec.block) / codec.block if codec.exchange == "gather" else 0.0
        limit = max(1, unit_elements(rows, sparse=sparse) // codec.block)
        if codec.exchange == "allreduce":
            limit = bucket.numel()  # a ring's additions depend on positions: as DDP, one a bucket
        tiles: list[Tile] = []
        columns = 0
        # Blocks and state belong to one parameter; without them neighbours are one tile.
        separate = codec.block > 1 or bool(self.kernels.memory.kinds)
        # Uncompressed elements may lie anywhere: the last of all runs share their padding.
        together = rows > 1 and codec.lossless and codec.block == 1
        tails: list[Sequence[Tensor]] = []
        for run in [[part] for part in slices] if separate else neighbours(slices):
            numel = sum(part.numel for part in run)
            flats = self._flats(run[0], numel, bucket)
            if together and (tail := numel % rows):
                tails.append([flat[numel - tail :] for flat in flats])
                numel -= tail
            for span in Grid(numel, rows, codec.block).spans(limit):
                if tiles and (columns + span.columns) * rows > limit:
                    yield tiles
                    tiles, columns = [], 0
                at = slice(columns, columns + span.columns)
                tiles.append(self._tile(run[0], flats, span, at))
                columns += span.columns
        if tails:
            tiles.append(joined("uncompressed", tails, rows=rows, start=columns))
        if tiles:
            yield tiles

    def _flats(self, first: ParameterSlice, numel: int, bucket: Tensor) -> list[Tensor]:
        """``numel`` gradients from the part ``first`` on, and its state."""
        dtype, device = compute_dtype(bucket.dtype), bucket.device
        return [
            bucket[first.offset : first.offset + numel],
            *(
                self.state.per_rank(kind, first, dtype=dtype, device=device)
                for kind in self.kernels.memory.kinds
            ),
        ]

    def _tile(
        self, first: ParameterSlice, flats: Sequence[Tensor], span: Span, columns: slice
    ) -> Tile:
        bucket = flats[0]
        numbers = span.numbers(bucket.device) if self.codec.stochastic else bucket.new_empty(0)
        name = f"{first.name} from {first.start}" if first.start else first.name
        return tile_of(name, flats, span, columns=columns, numbers=numbers)

    def _unit(self, tiles: Sequence[Tile], dtype: torch.dtype) -> BlockUnit:
        rank = self.network.rank
        keys = None
        if self.codec.stochastic:
            places = [Place(tile.name, tile.columns, tile.numbers) for tile in tiles]
            keys = UnitKeys(self.codec, places, rank=rank)
        exchange = self._exchange(tiles, dtype, keys)
        return BlockUnit(
            tiles,
            exchange,
            self.kernels,
            keys=keys,
            rank=rank,
            immediate=self.payloads is not None,
        )

    def _exchange(
        self, tiles: Sequence[Tile], dtype: torch.dtype, keys: UnitKeys | None
    ) -> Exchange:
        codec, net = self.codec, self.network
        planes, blocks = codec.planes(dtype), tiles[-1].columns.stop
        allocate = None if self.payloads is None else self.payloads.take
        if codec.exchange == "allreduce":
            whole = codec.lossless and len(tiles) == 1
            return AllReduce(
                planes,
                blocks,
                channel=net.data,
                topology=net.topology,
                device=net.device,
                keep_own=bool(tiles[0].state),
                in_place=tiles[0].grad if whole else None,
                allocate=allocate,
            )

        def reduce(shards: Payload, mean: Payload) -> None:
            self.kernels.reduce(shards, None if keys is None else keys.reduce, mean)

        way: dict[str, Any] = {"channel": net.data, "topology": net.topology, "device": net.device}
        if self.rows == 1:
            return AllGather(planes, blocks, **way, allocate=allocate)
        keep = self.payloads is None
        return TwoShot(planes, blocks, reduce=reduce, **way, keep_own=keep, allocate=allocate)
