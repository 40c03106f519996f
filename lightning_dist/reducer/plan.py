"""What happens to one bucket, worked out once and reused until DDP changes its layout.

bucket -> lanes (one codec each) -> chunks (one exchange each) -> pieces (one kernel call each).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.codecs.powersgd import PowerSGD
from lightning_dist.codecs.threshold import Threshold
from lightning_dist.exchange.traffic import ring_allreduce
from lightning_dist.reducer.block_plan import BlockPlan
from lightning_dist.reducer.chunk import Chunk, Lane
from lightning_dist.reducer.fusing import Variant, fused_passes
from lightning_dist.reducer.kernels import Factors, Kernels
from lightning_dist.reducer.low_rank import LowRankChunk
from lightning_dist.reducer.memory import memory_of
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.policy import Slot
from lightning_dist.reducer.sparse import SparseChunk
from lightning_dist.reducer.state import ReducerState


class Planner:
    """Builds lanes; owns one set of kernels per codec and dtype."""

    def __init__(
        self, network: Network, state: ReducerState, *, error_feedback: bool | Literal["auto"]
    ) -> None:
        self.network, self._state = network, state
        self._error_feedback: bool | Literal["auto"] = error_feedback
        self._kernels: dict[tuple[Codec, torch.dtype], Kernels] = {}

    def kernels(self, codec: BlockCodec, dtype: torch.dtype) -> Kernels:
        """Kernels for gradients of ``dtype``."""
        if (codec, dtype) not in self._kernels:
            world = self.network.world_size
            share = 1.0 / world
            factors = {
                "allreduce": Factors(encode=share, own=float(world)),
                "gather": Factors(mean=share),
                "two_shot": Factors(mean=share) if world == 2 else Factors(),
            }[codec.exchange]
            self._kernels[codec, dtype] = Kernels(
                codec,
                memory=memory_of(codec, self._error_feedback),
                factors=factors,
                world_size=world,
            )
        return self._kernels[codec, dtype]

    def fuse(self, codec: Codec, dtypes: Iterable[torch.dtype]) -> None:
        """Compile the kernels of ``codec`` for gradients of ``dtypes``, where that helps."""
        if not isinstance(codec, BlockCodec) or not codec.fusable or codec.lossless:
            return
        for dtype in dtypes:
            kernels = self.kernels(codec, dtype)
            rows = self._blocks(codec, dtype).rows
            variant = Variant(kernels.passes, dtype, rows, self.network.device)
            kernels.use(fused_passes(variant))

    def keeps_state(self, codec: Codec) -> bool:
        """Whether anything is kept from one step to the next."""
        return bool(memory_of(codec, self._error_feedback).kinds) or isinstance(codec, PowerSGD)

    def lane(self, codec: Codec, slots: Sequence[Slot], bucket: Tensor) -> Lane:
        """``slots`` of the flat ``bucket (N,)``, which stays where it is while the plan is used."""
        raw = sum(slot.numel for slot in slots) * bucket.itemsize
        return Lane(
            codec,
            slots,
            self._chunks(codec, slots, bucket),
            raw_bytes=ring_allreduce(raw, self.network.topology).total,
        )

    def _chunks(self, codec: Codec, slots: Sequence[Slot], bucket: Tensor) -> Sequence[Chunk]:
        if isinstance(codec, BlockCodec):
            return self._blocks(codec, bucket.dtype).chunks(slots, bucket)
        whole: dict[str, Any] = {
            "slots": slots,
            "bucket": bucket,
            "network": self.network,
            "state": self._state,
            "error_feedback": bool(memory_of(codec, self._error_feedback).kinds),
        }
        if isinstance(codec, PowerSGD):
            return [LowRankChunk(codec, **whole)]
        assert isinstance(codec, Threshold), codec
        return [SparseChunk(codec, **whole)]

    def _blocks(self, codec: BlockCodec, dtype: torch.dtype) -> BlockPlan:
        return BlockPlan(codec, self.kernels(codec, dtype), self.network, self._state)
