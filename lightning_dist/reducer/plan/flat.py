"""Codecs among the ranks of a flat network: block codecs, and what their units share.

A two-shot exchange gives every rank equally many blocks, so a parameter that has few of them is
mostly padding: 16 blocks of 256 elements on 256 ranks would be sent as 256 blocks. Such a
parameter gets smaller blocks (:func:`fitted`), and where that does not help either it travels
uncompressed (:func:`sends_more`). Both depend on the parameter and the ranks alone, never on the
bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dist.base.exchanges import EXCHANGES, ExchangeKind
from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.exchange.rounds import (
    AllReduce,
    Exchange,
    ExchangeArguments,
    PayloadMemory,
    RowExchange,
    Section,
    row_bytes,
)
from lightning_dist.kernels.inductor import Variant, fused_passes, known_passes
from lightning_dist.kernels.passes import Factors, Kernels, Pass, compute_dtype
from lightning_dist.kernels.triton import available_on, kernels_of
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.units.base import JoinedUnit, join
from lightning_dist.reducer.units.tiles import Grid
from lightning_dist.settings.exchange import ExchangeSettings

if TYPE_CHECKING:
    from lightning_dist.kernels.triton.passes import TableKernels  # import Triton


_PADDING = 1.25  # more bytes than without padding are reason enough for smaller blocks


@dataclass(frozen=True)
class BlockPlan:
    """Common state of the units of one codec for gradients of one dtype.

    ``payloads``: memory that tensors take turns with, where state is written when it is encoded;
    None where everything stays until the step is finished.
    """

    codec: BlockCodec
    dtype: torch.dtype
    kernels: Kernels
    network: Network
    state: ReducerState
    payloads: PayloadMemory | None
    tables: TableKernels | None = None  # of an accelerator: one launch for every pass of a bucket

    @property
    def immediate(self) -> bool:
        """Whether state is written when it is encoded, not when the mean is decoded."""
        return self.payloads is not None

    @property
    def kind(self) -> ExchangeKind:
        """Exchange of payloads between the ranks of the network."""
        return EXCHANGES[self.codec.exchange].among(self.network.world_size)

    @property
    def rows(self) -> int:
        """See :func:`rows_of`."""
        return rows_of(self.codec, self.network.world_size)

    def state_of(self, part: ParameterSlice) -> list[Tensor]:
        """State of this rank for ``part``, flat, as the memory says."""
        return [
            self.state.per_rank(
                kind, part, dtype=compute_dtype(self.dtype), device=self.network.device
            )
            for kind in self.kernels.memory.kinds
        ]

    @property
    def _where(self) -> ExchangeArguments:
        return self.network.where(None if self.payloads is None else self.payloads.take)

    def row_exchange(self, size: int) -> RowExchange:
        """One exchange of rows of so many bytes; not for linear codecs."""
        make: Callable[..., RowExchange] = self.kind.make
        if self.kind.reduced_by == "everyone":
            return make(size, **self._where)
        # Kernels over tables encode again when they write it.
        keep_own = not self.immediate and self.tables is None
        return make([size] * self.rows, keep_own=keep_own, **self._where)

    def exchange(self, blocks: int, *, in_place: Tensor | None) -> tuple[Exchange, Section]:
        """One exchange of so many blocks a row, and all of it.

        Args:
            in_place: memory of the blocks, to be added in itself where the codec is linear.
        """
        planes = self.codec.planes(self.dtype)
        if self.kind.linear:
            keep_own = bool(self.kernels.memory.kinds)
            reduce: AllReduce = self.kind.make(
                planes, blocks, keep_own=keep_own, in_place=in_place, **self._where
            )
            return reduce, reduce.whole
        exchange = self.row_exchange(row_bytes(planes, blocks))
        return exchange, exchange.section(planes, blocks)


class FlatPlanner:
    """Owns one plan, with its kernels, per block codec and dtype.

    Args:
        settings: say what is kept of errors, and whether Triton's kernels over tables of slices
            are used where the device has them.
        immediate: block codecs write their state when they encode, and tensors take turns with the
            memory of payloads.
        divide_last: uncompressed gradients are added and then divided, as torch's HSDP does; else
            divided and then added, as DDP does.
    """

    def __init__(
        self,
        network: Network,
        state: ReducerState,
        settings: ExchangeSettings,
        *,
        immediate: bool,
        divide_last: bool,
    ) -> None:
        self.network, self.state, self._divide_last = network, state, divide_last
        self.memory_of = settings.memory_of
        self._blocks: dict[tuple[BlockCodec, torch.dtype], BlockPlan] = {}
        self.sparse_passes: Mapping[str, Pass] = {}  # compiled
        self.compiles = True
        """Whether kernels are compiled that this process has not compiled before."""
        self._to_join: list[JoinedUnit] = []  # of the tensor that is planned
        self._tables = settings.compile_kernels is not False and available_on(network.device)
        self._immediate = immediate
        self.payloads = PayloadMemory(network.device)
        """Memory that tensors take turns with, where state is written when it is encoded."""

    def joined(self, unit: JoinedUnit) -> JoinedUnit:
        """``unit``, which travels with the others of its tensor that are joined."""
        self._to_join.append(unit)
        return unit

    def join(self) -> None:
        """All units of the tensor are planned."""
        units, self._to_join = self._to_join, []
        join(units)

    @property
    def is_fused(self) -> bool:
        """True if any kernels are compiled."""
        return bool(self.sparse_passes) or any(
            plan.kernels.is_fused for plan in self._blocks.values()
        )

    def fuse_kernels(self, plan: BlockPlan) -> None:
        """Compile the kernels of ``plan``, if their codec can be compiled."""
        if plan.codec.fusable and not plan.codec.lossless:
            passes, device = plan.kernels.passes, plan.network.device
            received = plan.kind.received(plan.network.world_size)
            variant = Variant(passes, plan.dtype, plan.rows, received, device, plan.immediate)
            plan.kernels.use(fused_passes(variant) if self.compiles else known_passes(variant))

    def _factors(self, codec: BlockCodec) -> Factors:
        """Factors by which a flat exchange makes a mean of the sum over ranks."""
        world = self.network.world_size
        kind = EXCHANGES[codec.exchange].among(world)
        if kind.reduced_by == "owners":
            return Factors()
        if kind.reduced_by == "everyone":
            return Factors(mean=1.0 / world)
        if self._divide_last and codec.lossless:  # the bits of torch's HSDP
            return Factors(divisor=float(world))
        return Factors(encode=1.0 / world, own=float(world))

    def blocks(self, codec: BlockCodec, dtype: torch.dtype) -> BlockPlan:
        """A block codec for gradients of ``dtype`` in a flat exchange."""
        if (codec, dtype) not in self._blocks:
            memory, factors = self.memory_of(codec), self._factors(codec)
            world, state = self.network.world_size, self.state
            kernels = Kernels(codec, memory=memory, factors=factors, world_size=world)
            by_owners = EXCHANGES[codec.exchange].reduced_by == "owners"
            in_tables = self._tables and by_owners and memory.in_tables
            tables = kernels_of(codec, dtype=dtype) if in_tables else None
            payloads = self.payloads if self._immediate else None
            plan = BlockPlan(codec, dtype, kernels, self.network, state, payloads, tables)
            self._blocks[codec, dtype] = plan
        return self._blocks[codec, dtype]


def key_name(part: ParameterSlice) -> str:
    """Name of a slice for the keys of its blocks."""
    return f"{part.name} from {part.start}" if part.start else part.name


def rows_of(codec: BlockCodec, ranks: int) -> int:
    """One row per rank where each rank reduces a shard, otherwise whole payloads travel."""
    return EXCHANGES[codec.exchange].among(ranks).rows(ranks)


def fitted(codec: BlockCodec, numel: int, *, ranks: int, dtype: torch.dtype) -> BlockCodec:
    """``codec`` with the largest block that pads ``numel`` elements by no more than a quarter.

    The block that sends least where every block pads more; other codecs as they are.
    """
    candidates = list(codec.smaller_blocks())
    if len(candidates) == 1:
        return codec
    rows = rows_of(codec, ranks)
    unpadded = sum(plane.bytes_per_block for plane in codec.planes(dtype)) * numel / codec.block
    sizes = {}
    for candidate in candidates:
        sizes[candidate] = rows * _row_bytes(candidate, numel, rows=rows, dtype=dtype)
        if sizes[candidate] <= _PADDING * unpadded:
            return candidate
    return min(sizes, key=sizes.__getitem__)


@singledispatch
def sends_more(
    codec: Codec, shares: Sequence[int], *, ranks: int, dtype: torch.dtype, itemsize: int
) -> bool:
    """Whether ``shares`` of a parameter, each in an exchange of ``ranks``, send more than DDP.

    Each is counted as if it were alone in its exchange, where padding weighs most.

    Args:
        dtype: in which the codec gets the gradients.
        itemsize: bytes of an element where it is not compressed.
    """
    return False  # a codec with units of its own chooses in `for_tensor` what it compresses


@sends_more.register(BlockCodec)
def _blocks_send_more(
    codec: BlockCodec, shares: Sequence[int], *, ranks: int, dtype: torch.dtype, itemsize: int
) -> bool:
    if EXCHANGES[codec.exchange].linear:
        return sum(codec.wire_bytes(numel, dtype) for numel in shares) > sum(shares) * itemsize
    rows, sent = rows_of(codec, ranks), 0
    for numel in shares:
        fit = fitted(codec, numel, ranks=ranks, dtype=dtype)
        # In units of (W-1)/W bytes: all payloads are gathered, or each row travels twice.
        sent += _row_bytes(fit, numel, rows=rows, dtype=dtype) * (ranks if rows == 1 else 2 * rows)
    return sent > 2 * sum(shares) * itemsize


def _row_bytes(codec: BlockCodec, numel: int, *, rows: int, dtype: torch.dtype) -> int:
    return row_bytes(codec.planes(dtype), Grid(numel, rows, codec.block).blocks_per_row)
