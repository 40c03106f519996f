"""Encode and decode of one codec without a network, on float32 gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dist.base.exchanges import EXCHANGES
from lightning_dist.codecs.base import Codec
from lightning_dist.codecs.none import NoCompression
from lightning_dist.ranks import Topology
from lightning_dist.ranks.channel import Channel, PendingWork
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.units.base import JoinedUnit
from lightning_dist.reducer.units.sizes import UNIT_ELEMENTS

WIDTH = 1024
"""Rows and columns of the gradients, which are matrices."""


class Passes:
    """The work of one rank on the gradients of matrices, before and after the exchange.

    Nothing is sent: every payload that is received is a copy of the rank's own.

    Args:
        feedback: keep the residual of error feedback.
        fused: use the kernels that training uses: compiled ones on a CPU, Triton's on a GPU.
        units: of a megabyte of gradient.
        ranks: of the exchange. A rank decodes one payload for each, or their sum.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        feedback: bool,
        fused: bool,
        device: torch.device,
        units: int,
        ranks: Literal[1, 2] = 2,
    ) -> None:
        self.numel = units * UNIT_ELEMENTS
        self.bucket = torch.zeros(self.numel, device=device)
        matrices = max(self.numel // WIDTH**2, 1)
        rows = self.numel // WIDTH // matrices
        slices = [ParameterSlice(f"{i}", i * rows * WIDTH, (rows, WIDTH)) for i in range(matrices)]
        channel = Copies(ranks)
        planner = Planner(
            Network(channel, channel, Topology(("host",) * ranks, 0), device),
            ReducerState(),
            memory_of=lambda each: each.memory(feedback),
            intra_codec=NoCompression(),
            immediate=True,
            tables=fused,
        )
        if fused:
            planner.fuse(codec, [self.bucket.dtype], sizes=[rows * WIDTH])
        (group,) = planner.groups({codec: slices}, self.bucket)
        self.units = group.units
        on_tables = any(isinstance(unit, JoinedUnit) for unit in self.units)
        self.is_fused = planner.is_fused or on_tables
        self.scale = torch.ones((), device=device)
        self.step = 0
        wire = (codec.payload_bytes((WIDTH, WIDTH)) or 0) / WIDTH**2
        kept = 2 * 4 * len(planner.kinds(codec))  # read and written
        received = 1 if EXCHANGES[codec.exchange].linear else ranks
        self.bytes_per_element = {
            "encode": 4 + wire + kept,
            # Block codecs commit their state when they encode.
            "decode": 4 + wire * received + (0 if codec.block else kept),
        }
        """Bytes that each pass must read and write at least."""

    def prepare(self) -> None:
        """Draw gradients for the next step."""
        self.step += 1
        self.bucket.normal_()

    def encode(self) -> None:
        for unit in self.units:
            unit.encode(self.scale, step=self.step)

    def exchange(self) -> None:
        for unit in self.units:
            unit.start()

    def decode(self) -> None:
        for unit in self.units:
            unit.start_second()
            unit.decode_and_commit(self.scale)


class Copies(Channel):
    """A channel whose ranks all send the same.

    Args:
        ranks: of the channel, of which this is the first.
        group: of this process alone, for what is not sent over channels.
    """

    def __init__(self, ranks: int, group: Any = None) -> None:
        super().__init__(group)
        self._ranks = ranks

    @override
    def all_reduce(
        self, tensor: Tensor, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> PendingWork:
        return _Over()

    @override
    def all_gather(self, output: Tensor, own: Tensor) -> PendingWork:
        for part in output.chunk(self._ranks):
            part.copy_(own)
        return _Over()

    @override
    def all_to_all(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: Sequence[int] | None = None,
        own_sizes: Sequence[int] | None = None,
    ) -> PendingWork:
        parts = torch.split(own, list(own_sizes)) if own_sizes else own.chunk(self._ranks)
        sizes = output_sizes or [len(output) // self._ranks] * self._ranks
        for part in torch.split(output, list(sizes)):
            part.copy_(parts[0])
        return _Over()


class _Over:
    def wait(self) -> None:
        pass
