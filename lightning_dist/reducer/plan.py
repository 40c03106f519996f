"""What happens to one bucket, worked out once and reused until DDP changes its layout.

bucket -> lanes (one codec each) -> chunks (one exchange each) -> pieces (one kernel call each).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.codecs.memory import NoMemory, memory_of
from lightning_dist.codecs.none import NoCompression
from lightning_dist.codecs.policies import raw_beside
from lightning_dist.codecs.powersgd import PowerSGD
from lightning_dist.codecs.threshold import Threshold
from lightning_dist.exchange.traffic import ring_allreduce
from lightning_dist.exchange.wire import row_bytes
from lightning_dist.kernels.inductor import Variant, compiled_sparse_passes, fused_passes
from lightning_dist.kernels.passes import Factors, Kernels, compute_dtype
from lightning_dist.kernels.sparse import SparsePasses
from lightning_dist.reducer.block_plan import BlockPlan
from lightning_dist.reducer.chunk import Chunk, Lane
from lightning_dist.reducer.chunk_sizes import chunk_elements
from lightning_dist.reducer.fitting import fitted, sends_more
from lightning_dist.reducer.flush import owed
from lightning_dist.reducer.fragments import fragments
from lightning_dist.reducer.hierarchical import Inside
from lightning_dist.reducer.low_rank import LowRankChunk
from lightning_dist.reducer.network import Network, Within
from lightning_dist.reducer.policy import Slot
from lightning_dist.reducer.scratch import PayloadMemory, Scratch
from lightning_dist.reducer.share_plan import SharePlan
from lightning_dist.reducer.sparse import SparseChunk
from lightning_dist.reducer.state import ReducerState


class Planner:
    """Builds lanes; owns one set of kernels per codec and dtype.

    Args:
        intra: the codec inside a host, where the exchange is hierarchical.
        whole: names of the parameters that some codec needs as a matrix.
        immediate: block codecs commit their state when they encode, and tensors take turns with the
            memory of payloads.
    """

    def __init__(
        self,
        network: Network,
        state: ReducerState,
        *,
        error_feedback: bool | Literal["auto"],
        intra: BlockCodec,
        whole: Collection[str] = (),
        immediate: bool = False,
    ) -> None:
        self.network, self._state = network, state
        self._error_feedback: bool | Literal["auto"] = error_feedback
        self._intra, self._whole = intra, whole
        self._kernels: dict[tuple[Codec, torch.dtype], Kernels] = {}
        self._inside: dict[tuple[BlockCodec, torch.dtype], Inside] = {}
        self._sparse: SparsePasses | None = None  # compiled
        self._scratch = Scratch(network.device)
        self._immediate = immediate
        self._payloads = PayloadMemory(network.device) if immediate else None
        self._across = None
        if network.within is not None and network.within.across is not None:
            self._across = Planner(
                network.within.across,
                state,
                error_feedback=error_feedback,
                intra=intra,
                whole=whole,
                immediate=immediate,
            )

    def restart(self, turn: int) -> None:
        """Before the lanes of a tensor are planned; tensors of one ``turn`` share memory."""
        if self._payloads is not None:
            self._payloads.restart(turn)
        if self._across is not None:
            self._across.restart(turn)

    def free(self) -> None:
        """Memory of payloads: what is planned from now on has new ones."""
        if self._payloads is not None:
            self._payloads = PayloadMemory(self.network.device)
        if self._across is not None:
            self._across.free()

    def kernels(self, codec: BlockCodec, dtype: torch.dtype) -> Kernels:
        """Kernels of a flat exchange for gradients of ``dtype``."""
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
        """Compile the kernels for gradients of ``dtypes``, where that helps."""
        within = self.network.within
        if within is None and isinstance(codec, Threshold):
            self._sparse = compiled_sparse_passes(self.network.device)
        for dtype in dtypes:
            if within is None and isinstance(codec, BlockCodec):
                plan = self._blocks(codec, dtype)
                self._fuse(plan.kernels, dtype, rows=plan.rows, received=plan.received)
            # A share is wider than 16-bit gradients, and a fused pass is for one of the two.
            elif within is not None and compute_dtype(dtype) == dtype:
                inside = self._inside_of(dtype, within, self._intra)
                self._fuse(inside.up, dtype, received=within.topology.world_size)
                self._fuse(inside.down, dtype)
            if self._across is not None:
                self._across.fuse(codec, [_share_dtype(codec, dtype)])

    @property
    def is_fused(self) -> bool:
        """Whether any kernels between hosts are compiled."""
        own = any(kernels.is_fused for kernels in self._kernels.values())
        own = own or self._sparse is not None
        return own or (self._across is not None and self._across.is_fused)

    def keeps_state(self, codec: Codec) -> bool:
        """Whether anything is kept from one step to the next."""
        return bool(memory_of(codec, self._error_feedback).kinds) or isinstance(codec, PowerSGD)

    def affordable(self, codec: Codec, slot: Slot, dtype: torch.dtype) -> Codec:
        """``codec``, or none where it would send more bytes of ``slot`` than that."""
        if not isinstance(codec, BlockCodec) or codec.lossless:
            return codec
        within, ranks = self.network.within, self.network.rows.count
        shares = self._cut(slot, 1 if within is None else within.owners * within.beyond)
        wide = dtype if within is None else _share_dtype(codec, dtype)
        more = sends_more(codec, shares, ranks=ranks, dtype=wide, itemsize=dtype.itemsize)
        return raw_beside(codec) if more else codec

    def lane(
        self, codec: Codec, slots: Sequence[Slot], bucket: Tensor, *, waits: bool = False
    ) -> Lane:
        """``slots`` of the flat ``bucket (N,)``, which stays where it is while the plan is used.

        ``waits``: compression has not begun, and state that was loaded is kept until it does.
        """
        kinds = memory_of(codec, self._error_feedback).kinds
        keeps = waits or "residual" in kinds
        unpaid = {} if keeps else owed(codec, slots, self._state, self.network)
        for slot in () if waits else slots:
            self._state.keep_for(codec, kinds, slot.name)
        for slot in slots:
            if slot.name in unpaid:
                self._state.know("residual", slot, dtype=compute_dtype(bucket.dtype))
        for slot, kind in product(slots, kinds):
            self._state.know(kind, slot, dtype=compute_dtype(bucket.dtype))
        raw = sum(slot.numel for slot in slots) * bucket.itemsize
        lane = Lane(
            codec,
            slots,
            self.chunks(codec, slots, bucket),
            raw_bytes=ring_allreduce(raw, self.network.topology).total,
            keeps_state=self.keeps_state(codec),
            owed=unpaid,
        )
        for slot, kind in product(slots, kinds):
            self._state.adopted(kind, slot.name)
        return lane

    def chunks(self, codec: Codec, slots: Sequence[Slot], bucket: Tensor) -> Sequence[Chunk]:
        """The exchanges of ``slots``, one after the other."""
        if self.network.within is not None:
            dtype, within = bucket.dtype, self.network.within
            by_intra: dict[BlockCodec, list[Slot]] = {}
            for slot in slots:
                by_intra.setdefault(self._intra_of(slot, within, dtype), []).append(slot)
            return [
                chunk
                for intra, some in by_intra.items()
                for chunk in self._shares(codec, within, dtype, intra).chunks(
                    some, bucket, share_dtype=_share_dtype(codec, dtype)
                )
            ]
        if isinstance(codec, BlockCodec):
            ranks, dtype = self.network.world_size, bucket.dtype
            by_block: dict[BlockCodec, list[Slot]] = {}
            for slot in slots:
                fit = fitted(codec, slot.numel, ranks=ranks, dtype=dtype)
                by_block.setdefault(fit, []).append(slot)
            plans = [(self._blocks(fit, dtype), some) for fit, some in by_block.items()]
            return [chunk for plan, some in plans for chunk in plan.chunks(some, bucket)]
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
        return [SparseChunk(codec, compiled=self._sparse, **whole)]

    @property
    def nbytes(self) -> int:
        """Of the buffers that chunks share."""
        shared = self._scratch.nbytes + (0 if self._payloads is None else self._payloads.nbytes)
        return shared + (0 if self._across is None else self._across.nbytes)

    def _cut(self, slot: Slot, parts: int) -> list[int]:
        """Elements of the shares of ``slot`` among so many ranks of a host."""
        if parts == 1 or slot.name in self._whole:
            return [slot.numel]
        most = chunk_elements(self.network.rows.count)
        found = fragments(
            slot.name, slot.numel, members=parts, owners=parts, most=most, whole=False
        )
        return [end - start for cut in found for start, end in cut.shares if end > start]

    def _intra_of(self, slot: Slot, within: Within, dtype: torch.dtype) -> BlockCodec:
        """The codec inside a host, or none where its blocks would be mostly padding."""
        intra, shares = self._intra, self._cut(slot, within.owners)
        sent = sum(row_bytes(intra.planes(dtype), -(-n // intra.block)) for n in shares)
        return NoCompression() if sent > slot.numel * dtype.itemsize else intra

    def _shares(
        self, codec: Codec, within: Within, dtype: torch.dtype, intra: BlockCodec
    ) -> SharePlan:
        kinds = memory_of(codec, self._error_feedback).kinds
        elementwise = isinstance(codec, BlockCodec) and codec.block == intra.block == 1
        return SharePlan(
            inside=self._inside_of(dtype, within, intra),
            within=within,
            across=lambda slots, share: self._chunks_across(codec, slots, share),
            scratch=self._scratch,
            whole=self._whole,
            separate=bool(kinds) or not elementwise,
            most=chunk_elements(self.network.rows.count),
            together=isinstance(codec, PowerSGD),
        )

    def _chunks_across(self, codec: Codec, slots: Sequence[Slot], share: Tensor) -> Sequence[Chunk]:
        return () if self._across is None else self._across.chunks(codec, slots, share)

    def _inside_of(self, dtype: torch.dtype, within: Within, intra: BlockCodec) -> Inside:
        if (intra, dtype) not in self._inside:
            up, down = (
                Kernels(
                    intra,
                    memory=NoMemory(),
                    factors=Factors(mean=weight),
                    world_size=within.topology.world_size,
                )
                for weight in (within.weight, 1.0)
            )
            self._inside[intra, dtype] = Inside(up, down)
        return self._inside[intra, dtype]

    def _fuse(
        self, kernels: Kernels, dtype: torch.dtype, *, rows: int = 1, received: int = 1
    ) -> None:
        if kernels.codec.fusable and not kernels.codec.lossless:
            variant = Variant(
                kernels.passes, dtype, rows, received, self.network.device, self._immediate
            )
            kernels.use(fused_passes(variant))

    def _blocks(self, codec: BlockCodec, dtype: torch.dtype) -> BlockPlan:
        kernels = self.kernels(codec, dtype)
        return BlockPlan(codec, kernels, self.network, self._state, self._payloads)


def _share_dtype(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """Wide, so that the codec alone rounds the mean of a host; without one, what is sent anyway."""
    return dtype if codec.lossless else compute_dtype(dtype)
