"""What happens to one bucket, worked out once and reused until DDP changes its layout.

bucket -> groups (one codec each) -> units (one exchange each) -> tiles (one kernel call each).
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
from lightning_dist.reducer.fitting import fitted, sends_more
from lightning_dist.reducer.flush import owed
from lightning_dist.reducer.fragments import fragments
from lightning_dist.reducer.hierarchical import IntraKernels
from lightning_dist.reducer.low_rank import LowRankUnit
from lightning_dist.reducer.network import IntraLevel, Network
from lightning_dist.reducer.scratch import PayloadMemory, Scratch
from lightning_dist.reducer.share_plan import SharePlan
from lightning_dist.reducer.slices import ParameterSlice
from lightning_dist.reducer.sparse import SparseUnit
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.unit import CodecGroup, CommUnit
from lightning_dist.reducer.unit_sizes import unit_elements


class Planner:
    """Builds groups; owns one set of kernels per codec and dtype.

    Args:
        intra_codec: the codec inside a host, where the exchange is hierarchical.
        whole: names of the parameters that some codec needs as a matrix.
        immediate: block codecs commit their state when they encode, and tensors take turns with the
            memory of payloads.
        divide_last: uncompressed gradients are added and then divided, as torch's HSDP does; else
            divided and then added, as DDP does.
    """

    def __init__(
        self,
        network: Network,
        state: ReducerState,
        *,
        error_feedback: bool | Literal["auto"],
        intra_codec: BlockCodec,
        whole: Collection[str] = (),
        immediate: bool = False,
        divide_last: bool = False,
    ) -> None:
        self.network, self._state, self._divide_last = network, state, divide_last
        self._error_feedback: bool | Literal["auto"] = error_feedback
        self._intra_codec, self._whole = intra_codec, whole
        self._kernels: dict[tuple[Codec, torch.dtype], Kernels] = {}
        self._intra_kernels_by_codec: dict[tuple[BlockCodec, torch.dtype], IntraKernels] = {}
        self._sparse: SparsePasses | None = None  # compiled
        self._scratch = Scratch(network.device)
        self._immediate = immediate
        self._payloads = PayloadMemory(network.device) if immediate else None
        self._inter = None
        if network.intra is not None and network.intra.inter is not None:
            self._inter = Planner(
                network.intra.inter,
                state,
                error_feedback=error_feedback,
                intra_codec=intra_codec,
                whole=whole,
                immediate=immediate,
            )

    def restart(self, turn: int) -> None:
        """Before the groups of a tensor are planned; tensors of one ``turn`` share memory."""
        if self._payloads is not None:
            self._payloads.restart(turn)
        if self._inter is not None:
            self._inter.restart(turn)

    def free(self) -> None:
        """Memory of payloads: what is planned from now on has new ones."""
        if self._payloads is not None:
            self._payloads = PayloadMemory(self.network.device)
        if self._inter is not None:
            self._inter.free()

    def kernels(self, codec: BlockCodec, dtype: torch.dtype) -> Kernels:
        """Kernels of a flat exchange for gradients of ``dtype``."""
        if (codec, dtype) not in self._kernels:
            world = self.network.world_size
            share = 1.0 / world
            sums_first = self._divide_last and codec.lossless  # the bits of torch's HSDP
            factors = {
                "allreduce": Factors(divisor=float(world))
                if sums_first
                else Factors(encode=share, own=float(world)),
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
        intra = self.network.intra
        if intra is None and isinstance(codec, Threshold):
            self._sparse = compiled_sparse_passes(self.network.device)
        for dtype in dtypes:
            if intra is None and isinstance(codec, BlockCodec):
                plan = self._blocks(codec, dtype)
                self._fuse(plan.kernels, dtype, rows=plan.rows, received=plan.received)
            # A share is wider than 16-bit gradients, and a fused pass is for one of the two.
            elif intra is not None and compute_dtype(dtype) == dtype:
                intra_kernels = self._intra_kernels_of(dtype, intra, self._intra_codec)
                self._fuse(intra_kernels.up, dtype, received=intra.topology.world_size)
                self._fuse(intra_kernels.down, dtype)
            if self._inter is not None:
                self._inter.fuse(codec, [_share_dtype(codec, dtype)])

    @property
    def is_fused(self) -> bool:
        """Whether any kernels between hosts are compiled."""
        own = any(kernels.is_fused for kernels in self._kernels.values())
        own = own or self._sparse is not None
        return own or (self._inter is not None and self._inter.is_fused)

    def keeps_state(self, codec: Codec) -> bool:
        """Whether anything is kept from one step to the next."""
        return bool(memory_of(codec, self._error_feedback).kinds) or isinstance(codec, PowerSGD)

    def affordable(self, codec: Codec, part: ParameterSlice, dtype: torch.dtype) -> Codec:
        """``codec``, or none where it would send more bytes of ``part`` than that."""
        if not isinstance(codec, BlockCodec) or codec.lossless:
            return codec
        intra, ranks = self.network.intra, self.network.rows.count
        shares = self._cut(part, 1 if intra is None else intra.owners * intra.beyond)
        wide = dtype if intra is None else _share_dtype(codec, dtype)
        more = sends_more(codec, shares, ranks=ranks, dtype=wide, itemsize=dtype.itemsize)
        return raw_beside(codec) if more else codec

    def group(
        self, codec: Codec, slices: Sequence[ParameterSlice], bucket: Tensor, *, waits: bool = False
    ) -> CodecGroup:
        """``slices`` of the flat ``bucket (N,)``, which stays where it is while the plan is used.

        ``waits``: compression has not staggered, and state that was loaded is kept until it does.
        """
        kinds = memory_of(codec, self._error_feedback).kinds
        keeps = waits or "residual" in kinds
        unpaid = {} if keeps else owed(codec, slices, self._state, self.network)
        for part in () if waits else slices:
            self._state.keep_for(codec, kinds, part.name)
        for part in slices:
            if part.name in unpaid:
                self._state.know("residual", part, dtype=compute_dtype(bucket.dtype))
        for part, kind in product(slices, kinds):
            self._state.know(kind, part, dtype=compute_dtype(bucket.dtype))
        raw = sum(part.numel for part in slices) * bucket.itemsize
        group = CodecGroup(
            codec,
            slices,
            self.units(codec, slices, bucket),
            raw_bytes=ring_allreduce(raw, self.network.topology).total,
            keeps_state=self.keeps_state(codec),
            owed=unpaid,
        )
        for part, kind in product(slices, kinds):
            self._state.adopted(kind, part.name)
        return group

    def units(
        self, codec: Codec, slices: Sequence[ParameterSlice], bucket: Tensor
    ) -> Sequence[CommUnit]:
        """The exchanges of ``slices``, one after the other."""
        if self.network.intra is not None:
            dtype, intra = bucket.dtype, self.network.intra
            by_intra_codec: dict[BlockCodec, list[ParameterSlice]] = {}
            for part in slices:
                by_intra_codec.setdefault(self._intra_of(part, intra, dtype), []).append(part)
            return [
                unit
                for intra_codec, some in by_intra_codec.items()
                for unit in self._shares(codec, intra, dtype, intra_codec).units(
                    some, bucket, share_dtype=_share_dtype(codec, dtype)
                )
            ]
        if isinstance(codec, BlockCodec):
            ranks, dtype = self.network.world_size, bucket.dtype
            by_block: dict[BlockCodec, list[ParameterSlice]] = {}
            for part in slices:
                fit = fitted(codec, part.numel, ranks=ranks, dtype=dtype)
                by_block.setdefault(fit, []).append(part)
            plans = [(self._blocks(fit, dtype), some) for fit, some in by_block.items()]
            return [unit for plan, some in plans for unit in plan.units(some, bucket)]
        whole: dict[str, Any] = {
            "slices": slices,
            "bucket": bucket,
            "network": self.network,
            "state": self._state,
            "error_feedback": bool(memory_of(codec, self._error_feedback).kinds),
        }
        if isinstance(codec, PowerSGD):
            return [LowRankUnit(codec, **whole)]
        assert isinstance(codec, Threshold), codec
        return [SparseUnit(codec, compiled=self._sparse, **whole)]

    @property
    def nbytes(self) -> int:
        """Of the buffers that units share."""
        shared = self._scratch.nbytes + (0 if self._payloads is None else self._payloads.nbytes)
        return shared + (0 if self._inter is None else self._inter.nbytes)

    def _cut(self, part: ParameterSlice, parts: int) -> list[int]:
        """Elements of the shares of ``part`` among so many ranks of a host."""
        if parts == 1 or part.name in self._whole:
            return [part.numel]
        most = unit_elements(self.network.rows.count)
        found = fragments(
            part.name, part.numel, members=parts, owners=parts, most=most, whole=False
        )
        return [end - start for cut in found for start, end in cut.shares if end > start]

    def _intra_of(self, part: ParameterSlice, intra: IntraLevel, dtype: torch.dtype) -> BlockCodec:
        """The codec inside a host, or none where its blocks would be mostly padding."""
        intra_codec, shares = self._intra_codec, self._cut(part, intra.owners)
        sent = sum(row_bytes(intra_codec.planes(dtype), -(-n // intra_codec.block)) for n in shares)
        return NoCompression() if sent > part.numel * dtype.itemsize else intra_codec

    def _shares(
        self, codec: Codec, intra: IntraLevel, dtype: torch.dtype, intra_codec: BlockCodec
    ) -> SharePlan:
        kinds = memory_of(codec, self._error_feedback).kinds
        elementwise = isinstance(codec, BlockCodec) and codec.block == intra_codec.block == 1
        return SharePlan(
            intra_kernels=self._intra_kernels_of(dtype, intra, intra_codec),
            intra=intra,
            inter=lambda slices, share: self._inter_units(codec, slices, share),
            scratch=self._scratch,
            whole=self._whole,
            separate=bool(kinds) or not elementwise,
            most=unit_elements(self.network.rows.count),
            together=isinstance(codec, PowerSGD),
        )

    def _inter_units(
        self, codec: Codec, slices: Sequence[ParameterSlice], share: Tensor
    ) -> Sequence[CommUnit]:
        return () if self._inter is None else self._inter.units(codec, slices, share)

    def _intra_kernels_of(
        self, dtype: torch.dtype, intra: IntraLevel, intra_codec: BlockCodec
    ) -> IntraKernels:
        if (intra_codec, dtype) not in self._intra_kernels_by_codec:
            up, down = (
                Kernels(
                    intra_codec,
                    memory=NoMemory(),
                    factors=Factors(mean=weight),
                    world_size=intra.topology.world_size,
                )
                for weight in (intra.weight, 1.0)
            )
            self._intra_kernels_by_codec[intra_codec, dtype] = IntraKernels(up, down)
        return self._intra_kernels_by_codec[intra_codec, dtype]

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
