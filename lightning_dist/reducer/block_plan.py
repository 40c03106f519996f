"""A block codec among the ranks of a flat network: its kernels, its exchange and its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Plane
from lightning_dist.exchange.rounds import (
    AllGather,
    AllReduce,
    Exchange,
    ReducePayload,
    TwoShot,
    Where,
)
from lightning_dist.exchange.wire import PayloadMemory
from lightning_dist.kernels.passes import Kernels, compute_dtype
from lightning_dist.reducer.fitting import rows_of
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState

if TYPE_CHECKING:
    from lightning_dist.kernels.triton.passes import SumOfPayloads, TableKernels  # import Triton


@dataclass(frozen=True)
class BlockPlan:
    """What the units of one codec for gradients of one dtype have in common.

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
    sums: SumOfPayloads | None = None  # the same where nothing is compressed and nothing is kept

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

    def exchange(
        self,
        blocks: int,
        *,
        reduce: ReducePayload,
        planes: Sequence[Plane] = (),
        in_place: Tensor | None = None,
    ) -> Exchange:
        """One exchange of so many blocks a row.

        Args:
            planes: those of the codec by default.
            in_place: memory of the blocks, to be added in itself; for lossless codecs.
        """
        network, planes = self.network, planes or self.codec.planes(self.dtype)
        where = Where(
            channel=network.data,
            topology=network.topology,
            device=network.device,
            allocate=None if self.payloads is None else self.payloads.take,
        )
        if self.codec.exchange == "allreduce":
            keep_own = bool(self.kernels.memory.kinds)
            return AllReduce(planes, blocks, keep_own=keep_own, in_place=in_place, **where)
        if self.rows == 1:
            return AllGather(planes, blocks, **where)
        return TwoShot(planes, blocks, reduce=reduce, keep_own=not self.immediate, **where)


def key_name(part: ParameterSlice) -> str:
    """Of a slice, for the keys of its blocks."""
    return f"{part.name} from {part.start}" if part.start else part.name
