"""What happens to one bucket, worked out once and reused until DDP changes its layout.

bucket -> groups (one codec each) -> units (one exchange each) -> tiles (one kernel call each).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from lightning_dist.accelerator import is_accelerator
from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.codecs.memory import ErrorFeedback, Memory, NoMemory
from lightning_dist.codecs.none import NoCompression
from lightning_dist.codecs.policies import raw_beside
from lightning_dist.exchange.traffic import ring_allreduce
from lightning_dist.exchange.wire import row_bytes
from lightning_dist.kernels.inductor import Variant, fused_passes
from lightning_dist.kernels.passes import Factors, Kernels, compute_dtype
from lightning_dist.kernels.sparse import SparsePasses
from lightning_dist.kernels.triton import available_on, kernels_of, sum_of
from lightning_dist.reducer import low_rank, sparse  # noqa: F401  (their units)
from lightning_dist.reducer.block_plan import BlockPlan
from lightning_dist.reducer.commit import owed
from lightning_dist.reducer.fitting import sends_more
from lightning_dist.reducer.hierarchical import HierarchicalUnit, IntraKernels
from lightning_dist.reducer.network import IntraLevel, Network
from lightning_dist.reducer.scratch import PayloadMemory
from lightning_dist.reducer.shares import Cut, fragments, shares_of, units_of_shares
from lightning_dist.reducer.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.unit import CodecGroup, CommUnit
from lightning_dist.reducer.unit_sizes import WHOLE_BUCKET, unit_elements
from lightning_dist.reducer.units import compile_passes, units_of


class Planner:
    """Builds groups; owns one set of kernels per codec and dtype.

    Args:
        intra_codec: the codec inside a host, where the exchange is hierarchical.
        whole: names of the parameters that some codec needs as they are.
        immediate: block codecs commit their state when they encode, and tensors take turns with the
            memory of payloads.
        tables: use Triton's kernels over tables of slices where the device has them.
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
        tables: bool = True,
        divide_last: bool = False,
    ) -> None:
        self.network, self.state, self._divide_last = network, state, divide_last
        self.error_feedback: bool | Literal["auto"] = error_feedback
        self._intra_codec, self._whole = intra_codec, whole
        self._kernels: dict[tuple[Codec, torch.dtype], Kernels] = {}
        self._intra_kernels_by_codec: dict[tuple[BlockCodec, torch.dtype], IntraKernels] = {}
        self.sparse_passes: SparsePasses | None = None  # compiled
        self.compiled: dict[Codec, tuple[set[torch.dtype], set[int]]] = {}
        """Dtypes and sizes of the gradients that kernels were compiled for."""
        self._scratch = PayloadMemory(network.device)
        self._immediate = immediate
        self._tables = tables and available_on(network.device)
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
                tables=tables,
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
                memory=codec.memory(self.error_feedback),
                factors=factors,
                world_size=world,
            )
        return self._kernels[codec, dtype]

    def fuse(
        self, codec: Codec, dtypes: Iterable[torch.dtype], *, sizes: Collection[int] = ()
    ) -> None:
        """Compile the kernels for gradients of ``dtypes``, where that helps.

        Args:
            sizes: elements of the parameters: small ones have kernels of their own in tables.
        """
        dtypes, sizes, intra = set(dtypes), set(sizes), self.network.intra
        known = self.compiled.setdefault(codec, (set(), set()))
        known[0].update(dtypes)
        known[1].update(sizes)
        if intra is None:
            compile_passes(codec, dtypes, self, sizes)
            return
        for dtype in dtypes:
            self._compile_intra(codec, dtype, intra)
        if self._inter is not None:
            parts = [ParameterSlice("", 0, (numel,)) for numel in sizes]
            shares = {share for part in parts for share in self._cut(part, intra.level.owners)}
            wide = {_share_dtype(codec, dtype) for dtype in dtypes}
            self._inter.fuse(codec, wide, sizes=shares)

    def _compile_intra(self, codec: Codec, dtype: torch.dtype, intra: IntraLevel) -> None:
        kernels, ranks = self._intra_kernels_of(dtype, intra, self._intra_codec), intra.topology
        if self.on_accelerator:
            summed = sum_of(kernels.up.passes, dtype=dtype) if self._tables else None
            if summed is not None:
                like = torch.ones((), device=self.network.device)
                wide = _share_dtype(codec, dtype)
                summed.compile(dtype, wide, count=ranks.world_size, like=like)
        # A share is wider than 16-bit gradients, and a fused pass is for one of the two.
        elif compute_dtype(dtype) == dtype:
            self.fuse_kernels(kernels.up, dtype, received=ranks.world_size)
            self.fuse_kernels(kernels.down, dtype)

    @property
    def on_accelerator(self) -> bool:
        return is_accelerator(self.network.device)

    @property
    def is_fused(self) -> bool:
        """Whether any kernels between hosts are compiled."""
        own = any(kernels.is_fused for kernels in self._kernels.values())
        own = own or self.sparse_passes is not None
        return own or (self._inter is not None and self._inter.is_fused)

    def keeps_state(self, codec: Codec) -> bool:
        """Whether anything is kept from one step to the next."""
        return bool(codec.memory(self.error_feedback).kinds) or codec.keeps_factors

    def affordable(self, codec: Codec, part: ParameterSlice, dtype: torch.dtype) -> Codec:
        """``codec``, or none where it would send more bytes of ``part`` than that."""
        if codec.lossless:
            return codec
        intra, ranks = self.network.intra, self.network.rows.count
        shares = self._cut(part, 1 if intra is None else intra.level.owners * intra.level.beyond)
        wide = dtype if intra is None else _share_dtype(codec, dtype)
        more = sends_more(codec, shares, ranks=ranks, dtype=wide, itemsize=dtype.itemsize)
        return raw_beside(codec) if more else codec

    def group(
        self, codec: Codec, slices: Sequence[ParameterSlice], bucket: Tensor, *, waits: bool = False
    ) -> CodecGroup:
        """``slices`` of the flat ``bucket (N,)``, which stays where it is while the plan is used.

        ``waits``: compression has not staggered, and state that was loaded is kept until it does.
        """
        kinds = codec.memory(self.error_feedback).kinds
        keeps = waits or "residual" in kinds
        unpaid = {} if keeps else owed(codec, slices, self.state, self.network)
        for part in () if waits else slices:
            self.state.keep_for(codec, kinds, part.name)
        for part in slices:
            if part.name in unpaid:
                self.state.know("residual", part, dtype=compute_dtype(bucket.dtype))
        for part, kind in product(slices, kinds):
            self.state.know(kind, part, dtype=compute_dtype(bucket.dtype))
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
            self.state.adopted(kind, part.name)
        return group

    def reserve(self, codec: Codec, slices: Sequence[ParameterSlice], dtype: torch.dtype) -> None:
        """Allocate the state that this rank keeps for ``slices`` of a tensor of ``dtype``."""
        kinds, wide = codec.memory(self.error_feedback).kinds, compute_dtype(dtype)
        for part, kind in product(slices, kinds):
            self.state.know(kind, part, dtype=wide)
            for held in self._held(codec, part, dtype):
                self.state.per_rank(kind, held, dtype=wide, device=self.network.device)
            self.state.adopted(kind, part.name)

    def _held(
        self, codec: Codec, part: ParameterSlice, dtype: torch.dtype
    ) -> Sequence[ParameterSlice]:
        """What this rank is responsible for of ``part``."""
        intra = self.network.intra
        if intra is None:
            return [part]
        if self._inter is None:
            return []
        inter, wide = self._inter, _share_dtype(codec, dtype)
        rank = intra.topology.rank
        return [
            held
            for cuts in self._cuts(codec, [part], intra, self._intra_codec)
            for share in shares_of(cuts, rank)
            for held in inter._held(codec, share, wide)
        ]

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
                for unit in self._hierarchical(codec, some, bucket, intra, intra_codec)
            ]
        return units_of(codec, slices, bucket, self)

    @property
    def nbytes(self) -> int:
        """Of the buffers that units share."""
        shared = self._scratch.nbytes + (0 if self._payloads is None else self._payloads.nbytes)
        return shared + (0 if self._inter is None else self._inter.nbytes)

    def _cut(self, part: ParameterSlice, parts: int) -> list[int]:
        """Elements of the shares of ``part`` among so many ranks of a host."""
        if parts == 1 or part.name in self._whole:
            return [part.numel]
        found = fragments(part.name, part.numel, owners=parts, most=self._most(), whole=False)
        return [end - start for cut in found for start, end in cut if end > start]

    def _intra_of(self, part: ParameterSlice, intra: IntraLevel, dtype: torch.dtype) -> BlockCodec:
        """The codec inside a host, or none where its blocks would be mostly padding."""
        intra_codec, shares = self._intra_codec, self._cut(part, intra.level.owners)
        sent = sum(row_bytes(intra_codec.planes(dtype), -(-n // intra_codec.block)) for n in shares)
        return NoCompression() if sent > part.numel * dtype.itemsize else intra_codec

    def _hierarchical(
        self,
        codec: Codec,
        slices: Sequence[ParameterSlice],
        bucket: Tensor,
        intra: IntraLevel,
        intra_codec: BlockCodec,
    ) -> list[HierarchicalUnit]:
        return [
            HierarchicalUnit(
                cuts,
                bucket,
                intra=intra,
                kernels=self._intra_kernels_of(bucket.dtype, intra, intra_codec),
                inter=lambda slices, share: self._inter_units(codec, slices, share),
                share_dtype=_share_dtype(codec, bucket.dtype),
                memory=self._scratch,
                padded=self._most() == WHOLE_BUCKET,
            )
            for cuts in self._cuts(codec, slices, intra, intra_codec)
        ]

    def _cuts(
        self,
        codec: Codec,
        slices: Sequence[ParameterSlice],
        intra: IntraLevel,
        intra_codec: BlockCodec,
    ) -> Iterator[Sequence[Cut]]:
        """What travels together inside a host, and who owns which part of it."""
        elementwise = codec.elementwise and intra_codec.elementwise
        return units_of_shares(
            slices,
            level=intra.level,
            most=self._most(),
            whole=self._whole,
            separate=bool(codec.memory(self.error_feedback).kinds) or not elementwise,
            together=codec.whole_tensors,
        )

    def _most(self) -> int:
        """Elements of a share on the way between hosts."""
        return unit_elements(self.network.rows.count, device=self.network.device.type)

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
                for weight in (intra.level.weight, 1.0)
            )
            summed = sum_of(up.passes, dtype=dtype) if self._tables else None
            if summed is not None:
                up.use({"decode_and_commit": summed})
            self._intra_kernels_by_codec[intra_codec, dtype] = IntraKernels(up, down)
        return self._intra_kernels_by_codec[intra_codec, dtype]

    def fuse_kernels(
        self, kernels: Kernels, dtype: torch.dtype, *, rows: int = 1, received: int = 1
    ) -> None:
        """Compile ``kernels`` for gradients of ``dtype``, if their codec can be compiled."""
        if kernels.codec.fusable and not kernels.codec.lossless:
            variant = Variant(
                kernels.passes, dtype, rows, received, self.network.device, self._immediate
            )
            kernels.use(fused_passes(variant))

    def blocks(self, codec: BlockCodec, dtype: torch.dtype) -> BlockPlan:
        """How a block codec cuts gradients of ``dtype`` of a flat exchange."""
        kernels = self.kernels(codec, dtype)
        tables = None
        if self._tables and codec.exchange == "two_shot" and _in_tables(kernels.memory):
            tables = kernels_of(codec, dtype=dtype)
        return BlockPlan(codec, kernels, self.network, self.state, self._payloads, tables)


def _share_dtype(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """Wide, so that the codec alone rounds the mean of a host; without one, what is sent anyway."""
    return dtype if codec.lossless else compute_dtype(dtype)


def _in_tables(memory: Memory) -> bool:
    """Whether the kernels over tables of slices know ``memory``."""
    return type(memory) in (NoMemory, ErrorFeedback)
