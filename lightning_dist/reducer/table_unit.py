"""Units of block codecs on an accelerator: whole buckets, and one kernel launch for every pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.accelerator import placed
from lightning_dist.codecs.base import BlockCodec, Payload
from lightning_dist.exchange.rounds import AllGather, TwoShot
from lightning_dist.exchange.wire import row_bytes
from lightning_dist.kernels.triton import Slice, SliceTable
from lightning_dist.reducer.block_plan import BlockPlan, key_name
from lightning_dist.reducer.block_unit import BlockUnit, tiles_of
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.fitting import fitted
from lightning_dist.reducer.keys import unit_salts
from lightning_dist.reducer.slices import ParameterSlice, as_one, neighbours
from lightning_dist.reducer.units import CommUnit, compile_passes, units_of

if TYPE_CHECKING:
    from lightning_dist.reducer.plan import Planner


class TableUnit(CommUnit):
    """All that a bucket has of one codec.

    The state of parameters stays where it is, each in memory of its own: the table has places
    relative to the residual with the lowest address.

    Args:
        residuals: of every slice, flat; none without error feedback.
    """

    exchange: AllGather | TwoShot

    def __init__(
        self,
        plan: BlockPlan,
        slices: Sequence[ParameterSlice],
        bucket: Tensor,
        *,
        residuals: Sequence[Tensor],
    ) -> None:
        assert plan.tables is not None
        self._plan, self._codec, self._kernels = plan, plan.codec, plan.tables
        self._slices, self._bucket, self._rank = slices, bucket, plan.network.rank
        self._immediate = plan.immediate
        self._residuals = residuals  # the table has their places: they must stay
        self._first = min(residuals, key=Tensor.data_ptr) if residuals else None
        self._names = [key_name(part) for part in slices]
        self._table = SliceTable.of_rows(
            plan.codec,
            [
                Slice(name, part.offset, part.numel, self._place(i))
                for i, (name, part) in enumerate(zip(self._names, slices, strict=True))
            ],
            rows=plan.rows,
            device=bucket.device,
        )
        exchange = plan.exchange(self._table.columns[0], reduce=lambda *_: self._reduce())
        assert isinstance(exchange, AllGather | TwoShot)
        self.exchange = exchange
        self._finite = torch.ones((), dtype=torch.bool, device=bucket.device)
        self._salts: Tensor | None = None
        self._scale = torch.ones((), dtype=torch.float32, device=bucket.device)
        self._sampled: BlockUnit | None = None
        self._step = 0

    def _place(self, i: int) -> int:
        if self._first is None:
            return 0
        return (self._residuals[i].data_ptr() - self._first.data_ptr()) // self._first.itemsize

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        self._scale, self._step = scale, step
        if self._codec.stochastic:
            salts = unit_salts(self._codec, self._names, step=step, rank=self._rank)
            self._salts = placed(salts, self._bucket.device)
        if not self._immediate:
            self._finite.fill_(True)
        self._kernels.encode(
            self._bucket,
            self._first,
            scale,
            table=self._table,
            payload=self.exchange.own_bytes,
            finite=None if self._immediate else self._finite,
            salts=self._salts_of(0),
            commit=self._immediate,
        )

    @override
    def finite(self) -> Tensor:
        return self._codec.finite(self.exchange.own) if self._immediate else self._finite

    def _reduce(self) -> None:
        assert isinstance(self.exchange, TwoShot)
        self._kernels.reduce(
            self.exchange.shard_bytes,
            self.exchange.mean_bytes,
            table=self._table,
            row=self._rank,
            residual=self._first if self._immediate else None,
            scale=self._scale,
            salts=self._salts_of(1),
        )

    @override
    def samples(self, sampler: Sampler, scale: Tensor) -> Iterator[CodecSample]:
        if self._sampled is None:  # tiles of the same slices and the same exchange
            most = self._bucket.numel() + len(self._slices) * self._plan.rows
            (tiles,) = tiles_of(self._plan, self._slices, self._bucket, limit=most)
            self._sampled = BlockUnit(self._plan, tiles, sampled=self.exchange)
        self._sampled.draw(self._step)
        yield from self._sampled.samples(sampler, scale)

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        self.wait()
        self._decode_and_commit(scale)

    def _decode_and_commit(self, scale: Tensor) -> None:
        if self._first is not None and not self._immediate:
            self._commit(self._first, scale)
        weight = self._plan.kernels.passes.factors.mean
        self._kernels.decode(
            self.exchange.payload_bytes, self._bucket, table=self._table, weight=weight
        )

    def _commit(self, residual: Tensor, scale: Tensor) -> None:
        table, kernels = self._table, self._kernels
        kernels.encode(
            self._bucket, residual, scale, table=table, payload=None, salts=self._salts_of(0)
        )
        if isinstance(self.exchange, TwoShot):
            kernels.reduce(
                self.exchange.shard_bytes,
                None,
                table=table,
                row=self._rank,
                residual=residual,
                scale=scale,
                salts=self._salts_of(1),
            )

    @property
    @override
    def nbytes(self) -> int:
        return self.exchange.nbytes + self._table.tiles.nbytes

    def compile(self) -> None:
        """Compile the kernels of every pass; nothing else happens."""
        kernels, self._kernels = self._kernels, self._kernels.compiling()
        self.encode(self._scale, step=0)
        if isinstance(self.exchange, TwoShot):
            self._reduce()
        self._decode_and_commit(self._scale)
        self._kernels = kernels

    def _salts_of(self, which: int) -> Tensor | None:
        return None if self._salts is None else self._salts[which]


class PackedUnit(CommUnit):
    """All uncompressed slices of a bucket: one copy into the payload, one sum and one copy back.

    Ranks own rows of what is packed, not of parameters: an element is the sum of all ranks' in
    their order, whoever adds it.
    """

    exchange: AllGather | TwoShot

    def __init__(self, plan: BlockPlan, slices: Sequence[ParameterSlice], bucket: Tensor) -> None:
        assert plan.sums is not None
        self._sums, self._codec, self._rows = plan.sums, plan.codec, plan.rows
        runs = [as_one(run).of(bucket) for run in neighbours(slices)]
        numel = sum(map(len, runs))
        whole = row_bytes(plan.codec.planes(plan.dtype), 1) // bucket.itemsize
        columns = -(-numel // (plan.rows * whole)) * whole  # rows follow each other without a gap
        exchange = plan.exchange(columns, reduce=self._reduce)
        assert isinstance(exchange, AllGather | TwoShot)
        self.exchange, self._flats = exchange, runs
        sizes = [len(run) for run in runs]
        self._places, self._means = (
            payload[0].view(-1)[:numel].split_with_sizes(sizes)
            for payload in (exchange.own, exchange.payloads[0])
        )

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        torch._foreach_copy_(self._places, self._flats)

    @override
    def finite(self) -> Tensor:
        return self._codec.finite(self.exchange.own)

    def _reduce(self, shards: Payload, mean: Payload) -> None:
        self._sums.add(mean[0], [(shard.unsqueeze(0),) for shard in shards[0]])

    @override
    def samples(self, sampler: Sampler, scale: Tensor) -> Iterator[CodecSample]:
        yield from ()  # nothing is lost

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        self.wait()
        if self._rows == 1:
            self._sums.add(self.exchange.payloads[0][0], self.exchange.payloads)
        torch._foreach_copy_(self._flats, self._means)


@units_of.register(BlockCodec)
def _units(
    codec: BlockCodec, slices: Sequence[ParameterSlice], bucket: Tensor, planner: Planner
) -> list[CommUnit]:
    ranks, dtype = planner.network.world_size, bucket.dtype
    by_block: dict[BlockCodec, list[ParameterSlice]] = {}
    for part in slices:
        fit = fitted(codec, part.numel, ranks=ranks, dtype=dtype)
        by_block.setdefault(fit, []).append(part)
    units: list[CommUnit] = []
    for fit, some in by_block.items():
        plan = planner.blocks(fit, dtype)
        if plan.tables is not None:
            residuals = [held for part in some for held in plan.state_of(part)]
            units.append(TableUnit(plan, some, bucket, residuals=residuals))
        elif plan.sums is not None:
            units.append(PackedUnit(plan, some, bucket))
        else:
            units += [BlockUnit(plan, tiles) for tiles in tiles_of(plan, some, bucket)]
    return units


@compile_passes.register(BlockCodec)
def _compile(
    codec: BlockCodec, dtypes: Iterable[torch.dtype], planner: Planner, sizes: Collection[int]
) -> None:
    on_accelerator, ranks = planner.on_accelerator, planner.network.world_size
    for dtype in dtypes:
        fits = {codec, *(fitted(codec, numel, ranks=ranks, dtype=dtype) for numel in sizes)}
        for plan in (planner.blocks(fit, dtype) for fit in fits if on_accelerator or fit == codec):
            if plan.tables is not None and on_accelerator:
                _compile_tables(plan)
            elif plan.sums is not None and on_accelerator:
                like = torch.ones((), device=planner.network.device)
                plan.sums.compile(dtype, dtype, count=ranks, like=like)
            elif not on_accelerator:  # torch's compiler is for the CPU
                planner.fuse_kernels(plan.kernels, dtype, rows=plan.rows, received=plan.received)


def _compile_tables(plan: BlockPlan) -> None:
    """Compile the kernels over tables, so that none is in a backward pass.

    They are specialised for slices at multiples of 16 elements, and for payloads at multiples
    of 16 bytes: a few sizes have it all.
    """
    whole = plan.codec.block * plan.rows
    for numel in (each for count in range(1, 9) for each in (count * whole, count * whole - 1)):
        bucket = torch.zeros(numel, dtype=plan.dtype, device=plan.network.device)
        residuals = [bucket.to(torch.float32)] if plan.kernels.memory.kinds else []
        TableUnit(plan, [ParameterSlice("", 0, (numel,))], bucket, residuals=residuals).compile()
