"""Units of block codecs on an accelerator: whole buckets, and one kernel launch for every pass.

All that a bucket has of codecs with kernels, and what it has of none, travels in two collectives.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import product

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.base.accelerator import is_accelerator, placed
from lightning_dist.codecs.base import BlockCodec
from lightning_dist.exchange.rounds import RowExchange, row_bytes
from lightning_dist.kernels.triton import Slice, SliceTable, packed
from lightning_dist.kernels.triton.table import ALIGNMENTS
from lightning_dist.ranks.traffic import Sent
from lightning_dist.reducer.plan.flat import BlockPlan, FlatPlanner, fitted, key_name
from lightning_dist.reducer.plan.slices import ParameterSlice, as_one, neighbours
from lightning_dist.reducer.units.base import CommUnit, JoinedUnit, join
from lightning_dist.reducer.units.block import BlockUnit, tiles_of
from lightning_dist.reducer.units.by_codec import compile_passes, units_of
from lightning_dist.reducer.units.tiles import unit_salts


class TableUnit(JoinedUnit):
    """All that a bucket has of one codec, beside the others in two collectives.

    The state of parameters stays where it is, each in memory of its own: the table has places
    relative to the residual with the lowest address. What is not compressed is packed: ranks own
    rows of it, not of parameters, since an element is the sum of all ranks' in their order on every
    rank.

    Args:
        residuals: of every slice, flat; none without error feedback.
    """

    exchange: RowExchange

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
        self._residuals = residuals  # the table has their places: they must stay
        self._first = min(residuals, key=Tensor.data_ptr) if residuals else None
        self._names = [key_name(part) for part in slices]
        rows = plan.rows
        if self._codec.lossless:
            runs = [(run.offset, run.numel) for run in map(as_one, neighbours(slices))]
            self._columns = -(-sum(numel for _, numel in runs) // rows)
            self._groups = packed(runs, rows=rows, columns=self._columns)
        else:
            self._columns = sum(-(-part.numel // (rows * self._codec.block)) for part in slices)
            places = [0] * len(slices)
            if self._first is not None:
                lowest, itemsize = self._first.data_ptr(), self._first.itemsize
                places = [(residual.data_ptr() - lowest) // itemsize for residual in residuals]
            pairs = zip(slices, places, strict=True)
            self._groups = [[Slice(part.offset, part.numel, place) for part, place in pairs]]
        self._planes = self._codec.planes(plan.dtype)
        self.row_bytes = [row_bytes(self._planes, self._columns)] * rows
        self._finite: Tensor | None = None  # set by the kernel, where state is written later
        if not (plan.immediate or self._codec.lossless):
            self._finite = torch.ones((), dtype=torch.bool, device=bucket.device)
        self._salts: Sequence[Tensor | None] = (None, None)  # for what is sent, and for the mean
        self._scale = torch.ones((), dtype=torch.float32, device=bucket.device)

    @override
    def make_exchange(self, row_bytes: Sequence[int]) -> RowExchange:
        return self._plan.row_exchange(row_bytes[0])

    @override
    def place(self, sizes: Sequence[int], before: Sequence[int]) -> None:
        self._table = SliceTable.of(
            self._codec,
            self._groups,
            rows=self._plan.rows // len(self._groups),
            device=self._bucket.device,
            dtype=self._plan.dtype,
            sizes=sizes,
            before=before,
        )
        self._section = self.exchange.section(self._planes, self._columns, before=before[0])

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        self._scale = scale
        if self._codec.stochastic:
            salts = unit_salts(self._codec, self._names, step=step, rank=self._rank)
            self._salts = placed(salts, self._bucket.device).unbind()
        if self._finite is not None:
            self._finite.fill_(True)
        self._kernels.encode(
            self._bucket,
            self._first,
            scale,
            table=self._table,
            payload=self.exchange.own_bytes,
            finite=self._finite,
            salts=self._salts[0],
            writes_state=self._plan.immediate,
        )

    @override
    def finite(self) -> Tensor:
        if self._finite is None:
            return self._codec.finite(self._section.own)
        return self._finite

    @override
    def start(self) -> None:
        if self.last:
            self.exchange.start()

    @override
    def start_second(self) -> None:
        if self._section.mean:
            self.exchange.wait()
            self._reduce(self.exchange.mean_bytes, writes_state=self._plan.immediate)
        if self.last:
            self.exchange.start_second()

    def _reduce(self, mean: Tensor | None, *, writes_state: bool) -> None:
        """Received payloads -> the ``mean`` to send, and its error into the residual."""
        self._kernels.reduce(
            self.exchange.received_bytes,
            mean,
            table=self._table,
            row=self._rank,
            residual=self._first if writes_state else None,
            scale=self._scale,
            salts=self._salts[1],
        )

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        self.wait()
        self._decode_and_commit(scale)

    def _decode_and_commit(self, scale: Tensor) -> None:
        bucket, table = self._bucket, self._table
        if self._first is not None and not self._plan.immediate:
            salts = self._salts[0]
            self._kernels.encode(bucket, self._first, scale, table=table, payload=None, salts=salts)
            if self._section.mean:
                self._reduce(None, writes_state=True)
        weight = self._plan.kernels.passes.factors.mean
        self._kernels.decode(self.exchange.payload_bytes, bucket, table=table, weight=weight)

    @property
    @override
    def sent(self) -> Sent:
        return self._section.sent

    @property
    @override
    def nbytes(self) -> int:
        return self._table.nbytes + (self.exchange.nbytes if self.first else 0)

    def compile(self) -> None:
        """Compile the kernels of every pass; nothing else happens."""
        kernels, self._kernels = self._kernels, self._kernels.compiling()
        self.encode(self._scale, step=0)
        if self._section.mean:
            self._reduce(self.exchange.mean_bytes, writes_state=self._plan.immediate)
        self._decode_and_commit(self._scale)
        self._kernels = kernels


@units_of.register(BlockCodec)
def _units(
    codec: BlockCodec, slices: Sequence[ParameterSlice], bucket: Tensor, planner: FlatPlanner
) -> list[CommUnit]:
    ranks, dtype = planner.network.world_size, bucket.dtype
    by_block: dict[BlockCodec, list[ParameterSlice]] = {}
    for part in slices:
        fit = fitted(codec, part.numel, ranks=ranks, dtype=dtype)
        by_block.setdefault(fit, []).append(part)
    units: list[CommUnit] = []
    for fit, parts in by_block.items():
        plan = planner.blocks(fit, dtype)
        if plan.tables is not None:
            residuals = [held for part in parts for held in plan.state_of(part)]
            units.append(planner.joined(TableUnit(plan, parts, bucket, residuals=residuals)))
        else:
            units += [BlockUnit(plan, tiles) for tiles in tiles_of(plan, parts, bucket)]
    return units


@compile_passes.register(BlockCodec)
def _compile(
    codec: BlockCodec, dtypes: Iterable[torch.dtype], planner: FlatPlanner, sizes: Collection[int]
) -> None:
    ranks, on_accelerator = planner.network.world_size, is_accelerator(planner.network.device)
    for dtype in dtypes:
        fits = {codec, *(fitted(codec, numel, ranks=ranks, dtype=dtype) for numel in sizes)}
        for plan in (planner.blocks(fit, dtype) for fit in fits if on_accelerator or fit == codec):
            if plan.tables is not None and on_accelerator:
                _compile_tables(plan)
            elif not on_accelerator:  # torch's compiler is for the CPU
                planner.fuse_kernels(plan)


def _compile_tables(plan: BlockPlan) -> None:
    """Compile the kernels over tables, so that none is in a backward pass.

    They are specialised for places of slices (:data:`ALIGNMENTS`), and for payloads at multiples of
    16 bytes, or not.
    """
    whole = math.lcm(16, plan.codec.block) * plan.rows
    for alignment, spare in product(ALIGNMENTS, (0, 8)):
        numel = whole - alignment % 16
        bucket = torch.zeros(numel, dtype=plan.dtype, device=plan.network.device)
        residuals = [bucket.to(torch.float32)] if plan.kernels.memory.kinds else []
        unit = TableUnit(plan, [ParameterSlice("", 0, (numel,))], bucket, residuals=residuals)
        unit.row_bytes = [size + spare for size in unit.row_bytes]
        join([unit])
        unit.compile()
