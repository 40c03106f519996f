"""Units of block codecs on an accelerator: whole buckets, and one kernel launch for every pass.

All that a bucket has of codecs with kernels, and what it has of none, travels in two collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.accelerator import placed
from lightning_dist.codecs.base import BlockCodec, Plane
from lightning_dist.exchange.rounds import AllGather, Exchange, Section, TwoShot
from lightning_dist.exchange.wire import row_bytes
from lightning_dist.kernels.triton import Slice, SliceTable
from lightning_dist.kernels.triton.table import Within
from lightning_dist.reducer.block_plan import BlockPlan, key_name
from lightning_dist.reducer.block_unit import BlockUnit, tiles_of
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.fitting import fitted
from lightning_dist.reducer.keys import unit_salts
from lightning_dist.reducer.slices import ParameterSlice, as_one, neighbours
from lightning_dist.reducer.units import CommUnit, JoinedUnit, compile_passes, join, units_of

if TYPE_CHECKING:
    from lightning_dist.reducer.plan import Planner


class _Joined(JoinedUnit):
    """What a bucket has of one codec, beside the others in two collectives."""

    exchange: AllGather | TwoShot

    def __init__(self, plan: BlockPlan, *, columns: int) -> None:
        self._plan, self._columns = plan, columns
        self._planes = plan.codec.planes(plan.dtype)

    @property
    @override
    def row_bytes(self) -> Sequence[int]:
        return [row_bytes(self._planes, self._columns)] * self._plan.rows

    @override
    def make_exchange(self, row_bytes: Sequence[int], reduce: Callable[[], None]) -> Exchange:
        size, byte = row_bytes[0], [Plane(torch.uint8, 1)]
        return self._plan.exchange(size, planes=byte, reduce=lambda *_: reduce())

    @override
    def place(self, within: Within) -> Section:
        return self.exchange.section(self._planes, self._columns, before=within.before[0])

    @override
    def finite(self) -> Tensor:
        return self._plan.codec.finite(self.section.own)


class TableUnit(_Joined):
    """All that a bucket has of one codec.

    The state of parameters stays where it is, each in memory of its own: the table has places
    relative to the residual with the lowest address.

    Args:
        residuals: of every slice, flat; none without error feedback.
    """

    def __init__(
        self,
        plan: BlockPlan,
        slices: Sequence[ParameterSlice],
        bucket: Tensor,
        *,
        residuals: Sequence[Tensor],
    ) -> None:
        assert plan.tables is not None
        per_column = plan.rows * plan.codec.block
        super().__init__(plan, columns=sum(-(-part.numel // per_column) for part in slices))
        self._codec, self._kernels = plan.codec, plan.tables
        self._slices, self._bucket, self._rank = slices, bucket, plan.network.rank
        self._immediate = plan.immediate
        self._residuals = residuals  # the table has their places: they must stay
        self._first = min(residuals, key=Tensor.data_ptr) if residuals else None
        self._names = [key_name(part) for part in slices]
        self._finite = torch.ones((), dtype=torch.bool, device=bucket.device)
        self._salts: Tensor | None = None
        self._scale = torch.ones((), dtype=torch.float32, device=bucket.device)
        self._sampled: BlockUnit | None = None
        self._step = 0

    @override
    def place(self, within: Within) -> Section:
        self._table = SliceTable.of_rows(
            self._codec,
            [
                Slice(name, part.offset, part.numel, self._residual_place(i))
                for i, (name, part) in enumerate(zip(self._names, self._slices, strict=True))
            ],
            rows=self._plan.rows,
            device=self._bucket.device,
            within=within,
        )
        return super().place(within)

    def _residual_place(self, i: int) -> int:
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
        return super().finite() if self._immediate else self._finite

    @override
    def reduce(self) -> None:
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
            self._sampled = BlockUnit(self._plan, tiles, sampled=self.section)
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
        return super().nbytes + self._table.tiles.nbytes

    def compile(self) -> None:
        """Compile the kernels of every pass; nothing else happens."""
        kernels, self._kernels = self._kernels, self._kernels.compiling()
        self.encode(self._scale, step=0)
        if isinstance(self.exchange, TwoShot):
            self.reduce()
        self._decode_and_commit(self._scale)
        self._kernels = kernels

    def _salts_of(self, which: int) -> Tensor | None:
        return None if self._salts is None else self._salts[which]


class PackedUnit(_Joined):
    """All uncompressed slices of a bucket: one copy into the payload, one sum and one copy back.

    Ranks own rows of what is packed, not of parameters: an element is the sum of all ranks' in
    their order, whoever adds it.
    """

    def __init__(self, plan: BlockPlan, slices: Sequence[ParameterSlice], bucket: Tensor) -> None:
        assert plan.sums is not None
        self._sums = plan.sums
        runs = [as_one(run).of(bucket) for run in neighbours(slices)]
        numel = sum(map(len, runs))
        whole = row_bytes(plan.codec.planes(plan.dtype), 1) // bucket.itemsize
        super().__init__(plan, columns=-(-numel // (plan.rows * whole)) * whole)
        self._rows = _in_rows(runs, self._columns)
        self._flats = [piece for row in self._rows for piece in row]

    @override
    def place(self, within: Within) -> Section:
        section = super().place(within)
        self._places, self._means = (
            self._pieces_of(payload[0]) for payload in (section.own, section.payloads[0])
        )
        return section

    def _pieces_of(self, rows: Tensor) -> list[Tensor]:
        """Where the flat pieces lie in the ``rows`` of a payload."""
        found: list[Tensor] = []
        for row, pieces in zip(rows.flatten(1), self._rows, strict=False):  # the last may be empty
            sizes = [len(piece) for piece in pieces]
            found += row[: sum(sizes)].split_with_sizes(sizes)
        return found

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        torch._foreach_copy_(self._places, self._flats)

    @override
    def reduce(self) -> None:
        (shards,) = self.section.received
        self._sums.add(self.section.mean[0], [(shard.unsqueeze(0),) for shard in shards[0]])

    @override
    def samples(self, sampler: Sampler, scale: Tensor) -> Iterator[CodecSample]:
        yield from ()  # nothing is lost

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        self.wait()
        if self._plan.rows == 1:
            self._sums.add(self.section.payloads[0][0], self.section.payloads)
        torch._foreach_copy_(self._flats, self._means)


def _in_rows(runs: Sequence[Tensor], columns: int) -> list[list[Tensor]]:
    """Flat tensors that follow each other, cut into rows of ``columns`` elements."""
    rows: list[list[Tensor]] = []
    room = 0
    for run in runs:
        left = run
        while len(left):
            if not room:
                rows.append([])
                room = columns
            piece, left = left[:room], left[room:]
            rows[-1].append(piece)
            room -= len(piece)
    return rows


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
            units.append(planner.joined(TableUnit(plan, some, bucket, residuals=residuals)))
        elif plan.sums is not None:
            units.append(planner.joined(PackedUnit(plan, some, bucket)))
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
        unit = TableUnit(plan, [ParameterSlice("", 0, (numel,))], bucket, residuals=residuals)
        join([unit])
        unit.compile()
