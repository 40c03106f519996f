"""How the parameters of a block codec are cut into units and tiles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Payload
from lightning_dist.exchange.rounds import (
    AllGather,
    AllReduce,
    Exchange,
    ReducePayload,
    TwoShot,
)
from lightning_dist.kernels.passes import Kernels, compute_dtype
from lightning_dist.reducer.block_unit import BlockUnit
from lightning_dist.reducer.fitting import fitted, rows_of
from lightning_dist.reducer.geometry import Grid, Span
from lightning_dist.reducer.keys import Place, UnitKeys
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.scratch import PayloadMemory
from lightning_dist.reducer.slices import ParameterSlice, neighbours
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.table_unit import TableUnit
from lightning_dist.reducer.tiles import Tile, joined, tile_of
from lightning_dist.reducer.unit_sizes import unit_elements
from lightning_dist.reducer.units import compile_passes, units_of

if TYPE_CHECKING:
    from lightning_dist.kernels.triton.passes import TableKernels
    from lightning_dist.reducer.plan import Planner


@units_of.register(BlockCodec)
def _units(
    codec: BlockCodec, slices: Sequence[ParameterSlice], bucket: Tensor, planner: Planner
) -> list[BlockUnit | TableUnit]:
    ranks, dtype = planner.network.world_size, bucket.dtype
    by_block: dict[BlockCodec, list[ParameterSlice]] = {}
    for part in slices:
        fit = fitted(codec, part.numel, ranks=ranks, dtype=dtype)
        by_block.setdefault(fit, []).append(part)
    plans = [(planner.blocks(fit, dtype), some) for fit, some in by_block.items()]
    return [unit for plan, some in plans for unit in plan.units(some, bucket)]


@compile_passes.register(BlockCodec)
def _compile(
    codec: BlockCodec, dtypes: Iterable[torch.dtype], planner: Planner, sizes: Collection[int]
) -> None:
    on_accelerator, ranks = planner.on_accelerator, planner.network.world_size
    for dtype in dtypes:
        fits = {codec, *(fitted(codec, numel, ranks=ranks, dtype=dtype) for numel in sizes)}
        for plan in (planner.blocks(fit, dtype) for fit in fits if on_accelerator or fit == codec):
            if plan.tables is not None and on_accelerator:
                plan.compile(dtype)
            elif not on_accelerator:  # torch's compiler is for the CPU
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
    tables: TableKernels | None = None  # of an accelerator: one launch for every pass of a bucket

    @property
    def rows(self) -> int:
        """One row per rank where each rank reduces a shard, otherwise whole payloads travel."""
        return rows_of(self.codec, self.network.world_size)

    @property
    def received(self) -> int:
        """Payloads that a rank decodes and adds."""
        whole = self.rows == 1 and self.codec.exchange != "allreduce"
        return self.network.world_size if whole else 1

    def units(
        self, slices: Sequence[ParameterSlice], bucket: Tensor
    ) -> Sequence[BlockUnit | TableUnit]:
        if self.tables is not None:
            residuals = [self._flats(part, part.numel, bucket)[1:] for part in slices]
            flats = [flat for of_slice in residuals for flat in of_slice]
            return [self._table_unit(self.tables, slices, bucket, residuals=flats)]
        return [self._unit(tiles, bucket.dtype) for tiles in self._tiles(slices, bucket)]

    def compile(self, dtype: torch.dtype) -> None:
        """Compile the kernels over tables, so that none is in a backward pass.

        They are specialised for slices at multiples of 16 elements, and for payloads at multiples
        of 16 bytes: a few sizes have it all.
        """
        kernels, device = self.tables, self.network.device
        assert kernels is not None
        whole = self.codec.block * self.rows
        for numel in (each for count in range(1, 9) for each in (count * whole, count * whole - 1)):
            bucket = torch.zeros(numel, dtype=dtype, device=device)
            residuals = [bucket.to(torch.float32)] if self.kernels.memory.kinds else []
            slices = [ParameterSlice("", 0, (numel,))]
            self._table_unit(kernels, slices, bucket, residuals=residuals).compile()

    def _table_unit(
        self,
        kernels: TableKernels,
        slices: Sequence[ParameterSlice],
        bucket: Tensor,
        *,
        residuals: Sequence[Tensor],
    ) -> TableUnit:
        dtype, immediate = bucket.dtype, self.payloads is not None

        def exchange(blocks: int, reduce: Callable[[], None]) -> AllGather | TwoShot:
            found = self._exchange(blocks, dtype, reduce=lambda shards, mean: reduce())
            assert isinstance(found, AllGather | TwoShot)
            return found

        def eager(exchange: Exchange) -> BlockUnit:
            (tiles,) = self._tiles(slices, bucket, limit=bucket.numel() + len(slices) * self.rows)
            keys = self._keys(tiles)
            return self._block_unit(tiles, exchange, keys, only_sampled=True)

        return TableUnit(
            self.codec,
            kernels,
            slices,
            names=[_name(part) for part in slices],
            bucket=bucket,
            residuals=residuals,
            exchange=exchange,
            rows=self.rows,
            rank=self.network.rank,
            weight=self.kernels.passes.factors.mean,
            immediate=immediate,
            eager=eager,
        )

    def _tiles(
        self, slices: Sequence[ParameterSlice], bucket: Tensor, *, limit: int = 0
    ) -> Iterator[list[Tile]]:
        rows, codec = self.rows, self.codec
        sparse = codec.wire_bytes(codec.block) / codec.block if codec.exchange == "gather" else 0.0
        limit = limit or max(1, unit_elements(rows, sparse=sparse) // codec.block)
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
        return tile_of(_name(first), flats, span, columns=columns, numbers=numbers)

    def _unit(self, tiles: Sequence[Tile], dtype: torch.dtype) -> BlockUnit:
        keys = self._keys(tiles)

        def reduce(shards: Payload, mean: Payload) -> None:
            self.kernels.reduce(shards, None if keys is None else keys.reduce, mean)

        exchange = self._exchange(tiles[-1].columns.stop, dtype, reduce=reduce, tiles=tiles)
        return self._block_unit(tiles, exchange, keys)

    def _keys(self, tiles: Sequence[Tile]) -> UnitKeys | None:
        if not self.codec.stochastic:
            return None
        places = [Place(tile.name, tile.columns, tile.numbers) for tile in tiles]
        return UnitKeys(self.codec, places, rank=self.network.rank)

    def _block_unit(
        self,
        tiles: Sequence[Tile],
        exchange: Exchange,
        keys: UnitKeys | None,
        *,
        only_sampled: bool = False,
    ) -> BlockUnit:
        return BlockUnit(
            tiles,
            exchange,
            self.kernels,
            keys=keys,
            rank=self.network.rank,
            immediate=self.payloads is not None,
            only_sampled=only_sampled,
        )

    def _exchange(
        self, blocks: int, dtype: torch.dtype, *, reduce: ReducePayload, tiles: Sequence[Tile] = ()
    ) -> Exchange:
        codec, net = self.codec, self.network
        planes = codec.planes(dtype)
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

        way: dict[str, Any] = {"channel": net.data, "topology": net.topology, "device": net.device}
        if self.rows == 1:
            return AllGather(planes, blocks, **way, allocate=allocate)
        keep = self.payloads is None
        return TwoShot(planes, blocks, reduce=reduce, **way, keep_own=keep, allocate=allocate)


def _name(part: ParameterSlice) -> str:
    """Of a slice, for the keys of its blocks."""
    return f"{part.name} from {part.start}" if part.start else part.name
