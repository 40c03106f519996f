"""Encode and decode of one codec alone, without a network, over float32 gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import singledispatch

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.codecs.noise import block_keys
from lightning_dist.codecs.none import NoCompression
from lightning_dist.exchange.channel import Channel, PendingWork
from lightning_dist.exchange.wire import row_bytes, views
from lightning_dist.kernels.inductor import Variant, fused_passes
from lightning_dist.kernels.passes import Factors, Kernels
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.units.sizes import UNIT_ELEMENTS
from lightning_dist.topology import Topology

WIDTH = 1024
"""Of the matrices of codecs that need matrices."""
_SEED = 1


class Passes(ABC):
    """Passes of a rank of two over its gradient, before and after the exchange."""

    numel: int
    is_fused = False

    def prepare(self) -> None:  # noqa: B027  (most passes can be repeated as they are)
        """Before each encode, outside the time."""

    @abstractmethod
    def encode(self) -> None: ...

    @abstractmethod
    def decode(self) -> None: ...

    @abstractmethod
    def bytes_per_element(self) -> dict[str, float]:
        """Bytes that each pass must read and write at least."""


class BlockPasses(Passes):
    """A block codec in the reducer's units; W = 2.

    Args:
        received: payloads to add; None: as many as there are with two ranks.
    """

    def __init__(
        self,
        codec: BlockCodec,
        *,
        feedback: bool,
        fused: bool,
        device: torch.device,
        units: int,
        received: int | None,
    ) -> None:
        self.codec, self.device = codec, device
        self.numel = units * UNIT_ELEMENTS
        self.blocks = UNIT_ELEMENTS // codec.block
        linear = codec.exchange == "allreduce"
        received = (1 if linear else 2) if received is None else received
        self.memory = codec.memory(feedback)
        factors = Factors(0.5, 2.0) if linear else Factors(mean=0.5)
        self.kernels = Kernels(codec, memory=self.memory, factors=factors, world_size=2)
        if fused:
            variant = Variant(
                self.kernels.passes,
                torch.float32,
                rows=1,
                received=received,
                device=device,
                immediate=True,
            )
            self.kernels.use(fused_passes(variant))
        self.is_fused = self.kernels.is_fused
        generator = torch.Generator().manual_seed(_SEED)
        shape = (units, 1, self.blocks, codec.block)
        self.grad = torch.randn(shape, generator=generator).to(device)
        self.state = [
            torch.randn(shape, generator=generator).to(device) * 0.01 for _ in self.memory.kinds
        ]
        self.scale = torch.ones((), device=device)
        self.payloads = [[self._payload() for _ in range(received)] for _ in range(units)]
        numbers = torch.arange(self.blocks, dtype=torch.int32, device=device).view(1, -1, 1)
        self.keys = block_keys(numbers, _SEED) if codec.stochastic else None

    def _payload(self) -> tuple[Tensor, ...]:
        planes = self.codec.planes(torch.float32)
        size = row_bytes(planes, self.blocks)
        return views(
            torch.zeros(1, size, dtype=torch.uint8, device=self.device), planes, self.blocks
        )

    @override
    def prepare(self) -> None:
        # What others have sent looks like the own payload: a sparse one of zeros is no work.
        for own, *others in self.payloads:
            for other in others:
                for plane, same in zip(other, own, strict=True):
                    plane.copy_(same)

    @override
    def encode(self) -> None:
        for i in range(len(self.payloads)):
            state = tuple(kept[i] for kept in self.state)
            encode = self.kernels.encode_and_commit if state else self.kernels.encode
            encode(self.grad[i], state, self.scale, self.keys, self.payloads[i][0])

    @override
    def decode(self) -> None:
        for i in range(len(self.payloads)):
            received = tuple(self.payloads[i])
            self.kernels.decode_and_commit(
                self.grad[i], (), self.scale, self.keys, received[0], received
            )

    @override
    def bytes_per_element(self) -> dict[str, float]:
        wire = self.codec.wire_bytes(UNIT_ELEMENTS) / UNIT_ELEMENTS
        kept = 4 * len(self.state)
        # State is read and written in the pass that encodes.
        return {
            "encode": 4 + wire + 2 * kept,
            "decode": 4 + wire * len(self.payloads[0]),
        }


class UnitPasses(Passes):
    """Codecs that see whole matrices or whole buckets, alone in a group of one rank."""

    def __init__(
        self, codec: Codec, *, feedback: bool, fused: bool, device: torch.device, units: int
    ) -> None:
        self.codec, self.feedback = codec, feedback
        self.numel = units * UNIT_ELEMENTS
        generator = torch.Generator().manual_seed(_SEED)
        self.bucket = torch.randn(self.numel, generator=generator).to(device)
        matrices = max(self.numel // WIDTH**2, 1)
        rows = self.numel // WIDTH // matrices
        slices = [ParameterSlice(f"{i}", i * rows * WIDTH, (rows, WIDTH)) for i in range(matrices)]
        network = Network(_Nobody(), _Nobody(), Topology(("host",), 0), device)
        planner = Planner(
            network, ReducerState(), error_feedback=feedback, intra_codec=NoCompression()
        )
        if fused:
            planner.fuse(codec, [self.bucket.dtype])
        self.is_fused = planner.is_fused
        self.units = planner.units(codec, slices, self.bucket)
        self.scale = torch.ones((), device=device)
        self.step = 0

    @override
    def prepare(self) -> None:
        self.step += 1
        self.bucket.normal_()  # it holds the result of the last step

    @override
    def encode(self) -> None:
        for unit in self.units:
            unit.encode(self.scale, step=self.step)

    @override
    def decode(self) -> None:
        for unit in self.units:
            unit.start()
            unit.start_second()
            unit.decode_and_commit(self.scale)

    @override
    def bytes_per_element(self) -> dict[str, float]:
        kept = 4 if self.feedback else 0
        return {"encode": 4 + 2 * kept, "decode": 4 + (8 if self.feedback else 0)}


class _Nobody(Channel):
    """A channel of one rank: there is nobody to exchange anything with."""

    def __init__(self) -> None:
        self.name, self.watch = "flat", None

    @override
    def all_reduce(
        self, tensor: Tensor, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> PendingWork:
        return _Over()

    @override
    def all_gather(self, output: Tensor, own: Tensor) -> PendingWork:
        output.copy_(own)
        return _Over()


class _Over:
    def wait(self) -> None:
        pass


@singledispatch
def make_passes(
    codec: Codec,
    *,
    feedback: bool,
    fused: bool,
    device: torch.device,
    units: int,
    received: int | None = None,
) -> Passes:
    """The passes of any codec over so many units."""
    return UnitPasses(codec, feedback=feedback, fused=fused, device=device, units=units)


make_passes.register(BlockCodec, BlockPasses)
