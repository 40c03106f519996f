"""Encode and settle of one codec alone, without a network, over 26 MB of float32 gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.codecs import BlockCodec, Codec, PowerSGD
from lightning_dist.codecs.noise import block_keys
from lightning_dist.exchange.channel import Channel
from lightning_dist.exchange.wire import row_bytes, views
from lightning_dist.reducer.block_plan import CHUNK_ELEMENTS
from lightning_dist.reducer.chunk import Chunk
from lightning_dist.reducer.fusing import Variant, fused_passes
from lightning_dist.reducer.kernels import Factors, Kernels
from lightning_dist.reducer.low_rank import LowRankChunk
from lightning_dist.reducer.memory import memory_of
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.policy import Slot
from lightning_dist.reducer.sparse import SparseChunk
from lightning_dist.reducer.state import ReducerState
from lightning_dist.topology import Topology

CHUNKS = 25
NUMEL = CHUNKS * CHUNK_ELEMENTS
_WIDTH = 1024
_SEED = 1


class Passes(ABC):
    """What a rank of two does with its gradient before and after the exchange."""

    def prepare(self) -> None:  # noqa: B027  (most passes can be repeated as they are)
        """Before each encode, outside the time."""

    @abstractmethod
    def encode(self) -> None: ...

    @abstractmethod
    def settle(self) -> None: ...

    @abstractmethod
    def bytes_per_element(self) -> dict[str, float]:
        """What each pass must read and write at least, however it is computed."""


class BlockPasses(Passes):
    """A block codec in the reducer's chunks; W = 2."""

    def __init__(
        self, codec: BlockCodec, *, feedback: bool, fused: bool, device: torch.device
    ) -> None:
        self.codec, self.device = codec, device
        self.blocks = CHUNK_ELEMENTS // codec.block
        linear = codec.exchange == "allreduce"
        self.memory = memory_of(codec, feedback)
        factors = Factors(0.5, 2.0) if linear else Factors(mean=0.5)
        self.kernels = Kernels(codec, memory=self.memory, factors=factors, world_size=2)
        if fused:
            variant = Variant(
                self.kernels.passes,
                torch.float32,
                rows=1,
                received=1 if linear else 2,
                device=device,
            )
            self.kernels.use(fused_passes(variant))
        generator = torch.Generator().manual_seed(_SEED)
        shape = (CHUNKS, 1, self.blocks, codec.block)
        self.grad = torch.randn(shape, generator=generator).to(device)
        self.state = [
            torch.randn(shape, generator=generator).to(device) * 0.01 for _ in self.memory.kinds
        ]
        self.scale = torch.ones((), device=device)
        self.ok = torch.ones((), dtype=torch.bool, device=device)
        received = 1 if linear else 2
        self.payloads = [[self._payload() for _ in range(received)] for _ in range(CHUNKS)]
        numbers = torch.arange(self.blocks, dtype=torch.int32, device=device).view(1, -1, 1)
        self.keys = block_keys(numbers, _SEED) if codec.stochastic else None

    def _payload(self) -> tuple[Tensor, ...]:
        planes = self.codec.planes(torch.float32)
        size = row_bytes(planes, self.blocks)
        return views(
            torch.zeros(1, size, dtype=torch.uint8, device=self.device), planes, self.blocks
        )

    def encode(self) -> None:
        for i in range(CHUNKS):
            state = tuple(kept[i] for kept in self.state)
            self.kernels.encode(self.grad[i], state, self.scale, self.keys, self.payloads[i][0])

    def settle(self) -> None:
        for i in range(CHUNKS):
            state = tuple(kept[i] for kept in self.state)
            own, received = self.payloads[i][0], self.payloads[i]
            self.kernels.settle(
                self.grad[i], state, self.scale, self.ok, self.keys, own, tuple(received)
            )

    def bytes_per_element(self) -> dict[str, float]:
        wire = self.codec.wire_bytes(CHUNK_ELEMENTS) / CHUNK_ELEMENTS
        kept = 4 * len(self.state)
        # settle with a state: read gradient, state, payloads; write gradient, state
        return {
            "encode": 4 + wire + kept,
            "settle": 4 + wire * len(self.payloads[0]) + (4 + 2 * kept if kept else 0),
        }


class ChunkPasses(Passes):
    """Codecs that see whole matrices or whole buckets, alone in a group of one rank."""

    def __init__(self, codec: Codec, *, feedback: bool, device: torch.device) -> None:
        self.codec, self.feedback = codec, feedback
        generator = torch.Generator().manual_seed(_SEED)
        self.bucket = torch.randn(NUMEL, generator=generator).to(device)
        rows = NUMEL // _WIDTH // 5
        slots = [Slot(f"{i}", i * rows * _WIDTH, (rows, _WIDTH)) for i in range(5)]
        group = dist.group.WORLD
        assert group is not None, "initialise a group of one rank first"
        network = Network(Channel(group), Channel(group), Topology(("host",), 0), device)
        make: type[LowRankChunk] | type[SparseChunk]
        make = LowRankChunk if isinstance(codec, PowerSGD) else SparseChunk
        state = ReducerState()
        self.chunks: Sequence[Chunk] = [
            make(
                codec,
                slots=slots,
                bucket=self.bucket,
                network=network,
                state=state,
                error_feedback=feedback,
            )
        ]
        self.scale = torch.ones((), device=device)
        self.ok = torch.ones((), dtype=torch.bool, device=device)
        self.step = 0

    def prepare(self) -> None:
        self.step += 1
        self.bucket.normal_()  # it holds the result of the last step

    def encode(self) -> None:
        for chunk in self.chunks:
            chunk.encode(self.scale, step=self.step)

    def settle(self) -> None:
        for chunk in self.chunks:
            chunk.issue()
            chunk.advance()
            chunk.settle(self.scale, self.ok)

    def bytes_per_element(self) -> dict[str, float]:
        kept = 4 if self.feedback else 0
        return {"encode": 4 + 2 * kept, "settle": 4 + (8 if self.feedback else 0)}


def make_passes(codec: Codec, *, feedback: bool, fused: bool, device: torch.device) -> Passes:
    """The passes of any codec."""
    if isinstance(codec, BlockCodec):
        return BlockPasses(codec, feedback=feedback, fused=fused, device=device)
    return ChunkPasses(codec, feedback=feedback, device=device)
