"""A block codec among the ranks of a flat network: its kernels, its exchange and its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec
from lightning_dist.exchange.rounds import (
    AllGather,
    AllReduce,
    Exchange,
    RowExchange,
    Section,
    TwoShot,
    Where,
)
from lightning_dist.exchange.wire import PayloadMemory, row_bytes
from lightning_dist.kernels.passes import Kernels, compute_dtype
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.fitting import rows_of
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState

if TYPE_CHECKING:
    from lightning_dist.kernels.triton.passes import TableKernels  # import Triton


@dataclass(frozen=True)
class BlockPlan:
    """Common state of the units of one codec for gradients of one dtype.

    ``payloads``: memory that tensors take turns with, where state is committed when it is encoded;
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
        """Whether state is committed when it is encoded, not when the mean is decoded."""
        return self.payloads is not None

    @property
    def rows(self) -> int:
        """One row per rank where each rank reduces a shard, otherwise whole payloads travel."""
        return rows_of(self.codec, self.network.world_size)

    @property
    def received(self) -> int:
        """Payloads that a rank decodes and adds."""
        whole = self.rows == 1 and self.codec.exchange != "allreduce"
        return self.network.world_size if whole else 1

    def state_of(self, part: ParameterSlice) -> list[Tensor]:
        """This rank's state for ``part``, flat, as the memory says."""
        return [
            self.state.per_rank(
                kind, part, dtype=compute_dtype(self.dtype), device=self.network.device
            )
            for kind in self.kernels.memory.kinds
        ]

    @property
    def _where(self) -> Where:
        network = self.network
        return Where(
            channel=network.data,
            topology=network.topology,
            device=network.device,
            allocate=None if self.payloads is None else self.payloads.take,
        )

    def row_exchange(self, size: int) -> RowExchange:
        """One exchange of rows of so many bytes; not for linear codecs."""
        if self.rows == 1:
            return AllGather(size, **self._where)
        # Kernels over tables encode again when they commit.
        keep_own = not self.immediate and self.tables is None
        return TwoShot([size] * self.rows, keep_own=keep_own, **self._where)

    def exchange(self, blocks: int, *, in_place: Tensor | None) -> tuple[Exchange, Section]:
        """One exchange of so many blocks a row, and all of it.

        Args:
            in_place: memory of the blocks, to be added in itself where the codec is linear.
        """
        planes = self.codec.planes(self.dtype)
        if self.codec.exchange == "allreduce":
            keep_own = bool(self.kernels.memory.kinds)
            reduce = AllReduce(planes, blocks, keep_own=keep_own, in_place=in_place, **self._where)
            return reduce, reduce.whole
        exchange = self.row_exchange(row_bytes(planes, blocks))
        return exchange, exchange.section(planes, blocks)


def key_name(part: ParameterSlice) -> str:
    """Of a slice, for the keys of its blocks."""
    return f"{part.name} from {part.start}" if part.start else part.name
