"""Plan of one bucket, made once and reused until DDP changes its layout.

bucket -> groups (one codec each) -> units (one exchange each) -> tiles (one kernel call each).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from lightning_dist.base.exchanges import EXCHANGES
from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.codecs.policies import raw_beside
from lightning_dist.exchange.wire import PayloadMemory
from lightning_dist.kernels.inductor import Variant, fused_passes, known_passes
from lightning_dist.kernels.passes import Factors, Kernels, Pass, compute_dtype
from lightning_dist.kernels.triton import available_on, kernels_of
from lightning_dist.ranks.traffic import ring_allreduce
from lightning_dist.reducer.codec_sample import SampleSource
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.block import BlockPlan, sends_more
from lightning_dist.reducer.plan.intra import IntraPlan, share_dtype
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.units import low_rank, sparse, table  # noqa: F401  (their units)
from lightning_dist.reducer.units.base import (
    CodecGroup,
    CommUnit,
    JoinedUnit,
    compile_passes,
    join,
    units_of,
)
from lightning_dist.reducer.units.hierarchical import HierarchicalUnit


class Planner:
    """Builds groups; owns one plan, with its kernels, per block codec and dtype.

    Args:
        intra_codec: the codec inside a node, where the exchange is hierarchical.
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
        self._blocks: dict[tuple[BlockCodec, torch.dtype], BlockPlan] = {}
        self.sparse_passes: Mapping[str, Pass] = {}  # compiled
        self.compiled: dict[Codec, tuple[set[torch.dtype], set[int]]] = {}
        """Dtypes and sizes of the gradients that kernels were compiled for."""
        self.immediate, self._compiles = immediate, True
        self._to_join: list[JoinedUnit] = []  # of the tensor that is planned
        self.tables = tables and available_on(network.device)
        self._payloads = PayloadMemory(network.device) if immediate else None
        self._intra: IntraPlan | None = None
        if network.intra is not None:
            inter = None
            if network.intra.inter is not None:
                inter = Planner(
                    network.intra.inter,
                    state,
                    error_feedback=error_feedback,
                    intra_codec=intra_codec,
                    immediate=immediate,
                    tables=tables,
                )
            self._intra = IntraPlan(network, intra_codec, inter, whole=whole)

    @property
    def _levels(self) -> Sequence[Planner]:
        """Not kept: a reference cycle would keep the network's groups."""
        inter = None if self._intra is None else self._intra.inter
        return [self] if inter is None else [self, inter]

    def joined(self, unit: JoinedUnit) -> JoinedUnit:
        """``unit``, which travels with the others of its tensor that are joined."""
        self._to_join.append(unit)
        return unit

    def free(self) -> None:
        """Memory of payloads: what is planned from now on has new ones."""
        for level in self._levels:
            if level._payloads is not None:
                level._payloads.clear()

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

    def fuse(
        self, codec: Codec, dtypes: Iterable[torch.dtype], *, sizes: Collection[int] = ()
    ) -> None:
        """Compile the kernels for gradients of ``dtypes``, where that helps.

        Args:
            sizes: elements of the parameters: small ones have kernels of their own in tables.
        """
        dtypes, sizes = set(dtypes), set(sizes)
        known = self.compiled.setdefault(codec, (set(), set()))
        known[0].update(dtypes)
        known[1].update(sizes)
        for each in dict.fromkeys((codec, raw_beside(codec))):  # what small tensors are given
            if self._intra is None:
                compile_passes(each, dtypes, self, sizes)
            elif self._intra.inter is not None:
                parts = [ParameterSlice("", 0, (numel,)) for numel in sizes]
                shares = {share for part in parts for share in self._intra.lengths(part)}
                wide = {share_dtype(each, dtype) for dtype in dtypes}
                self._intra.inter.fuse(each, wide, sizes=shares)

    def compile_no_more(self) -> None:
        """Use kernels only that this process has compiled before: all have the same bytes."""
        for level in self._levels:
            level._compiles = False

    @property
    def is_fused(self) -> bool:
        """Whether any kernels between nodes are compiled."""
        return any(
            level.sparse_passes or any(plan.kernels.is_fused for plan in level._blocks.values())
            for level in self._levels
        )

    def kinds(self, codec: Codec) -> Sequence[str]:
        """Kinds of state that differ from rank to rank, under ``codec`` and the user's settings."""
        return codec.memory(self.error_feedback).kinds

    def keeps_state(self, codec: Codec) -> bool:
        """Whether anything is kept from one step to the next."""
        return bool(self.kinds(codec)) or codec.keeps_factors

    def affordable(self, codec: Codec, part: ParameterSlice, dtype: torch.dtype) -> Codec:
        """``codec``, or none where it would send more bytes of ``part`` than that."""
        if codec.lossless:
            return codec
        shares, wide, intra = [part.numel], dtype, self._intra
        if intra is not None:
            shares = intra.lengths(part)
            wide = share_dtype(codec, dtype)
        ranks = self.network.rows.count
        more = sends_more(codec, shares, ranks=ranks, dtype=wide, itemsize=dtype.itemsize)
        return raw_beside(codec) if more else codec

    def groups(
        self,
        cut: Mapping[Codec, Sequence[ParameterSlice]],
        bucket: Tensor,
        *,
        turn: int = 0,
        waits: bool = False,
    ) -> list[CodecGroup]:
        """Slices of the flat ``bucket (N,)``, which stays where it is while the plan is used.

        Args:
            turn: tensors of one turn share memory.
            waits: compression has not started, and state that was loaded is kept until it does.
        """
        for level in self._levels:
            if level._payloads is not None:
                level._payloads.restart(turn)
        groups = [self._group(codec, slices, bucket, waits) for codec, slices in cut.items()]
        for level in self._levels:
            units, level._to_join = level._to_join, []
            if units:
                join(units)
        return groups

    def _group(
        self, codec: Codec, slices: Sequence[ParameterSlice], bucket: Tensor, waits: bool
    ) -> CodecGroup:
        kinds = self.kinds(codec)
        for part in slices:
            if not waits:
                self.state.keep_for(codec, kinds, part.name)
            for kind in kinds:
                self.state.know(kind, part, dtype=compute_dtype(bucket.dtype))
        raw = sum(part.numel for part in slices) * bucket.itemsize
        group = CodecGroup(
            codec,
            slices,
            self.units(codec, slices, bucket),
            raw_bytes=ring_allreduce(raw, self.network.topology).total,
            keeps_state=self.keeps_state(codec),
        )
        for part, kind in product(slices, kinds):
            self.state.adopted(kind, part.name)
        return group

    def reserve(self, codec: Codec, slices: Sequence[ParameterSlice], dtype: torch.dtype) -> None:
        """Allocate the state that this rank keeps for ``slices`` of a tensor of ``dtype``."""
        kinds, wide = self.kinds(codec), compute_dtype(dtype)
        for part, kind in product(slices, kinds):
            self.state.know(kind, part, dtype=wide)
            for held in self.held(codec, part, dtype):
                self.state.per_rank(kind, held, dtype=wide, device=self.network.device)
            self.state.adopted(kind, part.name)

    def held(
        self, codec: Codec, part: ParameterSlice, dtype: torch.dtype
    ) -> Iterable[ParameterSlice]:
        """Section of ``part`` that this rank owns."""
        return [part] if self._intra is None else self._intra.held(codec, part, dtype)

    def units(
        self, codec: Codec, slices: Sequence[ParameterSlice], bucket: Tensor
    ) -> Sequence[CommUnit]:
        """The exchanges of ``slices``, one after the other; those that are joined come later."""
        if self._intra is None:
            units = units_of(codec, slices, bucket, self)
            if not units:
                names = ", ".join(part.name for part in slices)
                raise ValueError(
                    f"units_of must give the units that exchange {names} under codec "
                    f"{codec.name!r}, got an empty list; return at least one"
                )
            if not codec.lossless:
                units[0].source = SampleSource(codec, slices, bucket, self)
            return units
        keeps = bool(self.kinds(codec))
        inside = [
            HierarchicalUnit(self._intra, codec, owned, bucket)
            for owned in self._intra.units(codec, slices, keeps=keeps)
        ]
        for unit in inside:
            self.joined(unit) if self._intra.whole_buckets else join([unit])
        return inside

    @property
    def nbytes(self) -> int:
        """Of the buffers that units share."""
        memory = [level._payloads for level in self._levels]
        memory += [level._intra.memory for level in self._levels if level._intra is not None]
        return sum(each.nbytes for each in memory if each is not None)

    def fuse_kernels(self, plan: BlockPlan) -> None:
        """Compile the kernels of ``plan``, if their codec can be compiled."""
        if plan.codec.fusable and not plan.codec.lossless:
            passes, device = plan.kernels.passes, plan.network.device
            received = plan.kind.received(plan.network.world_size)
            variant = Variant(passes, plan.dtype, plan.rows, received, device, plan.immediate)
            plan.kernels.use(fused_passes(variant) if self._compiles else known_passes(variant))

    def blocks(self, codec: BlockCodec, dtype: torch.dtype) -> BlockPlan:
        """A block codec for gradients of ``dtype`` in a flat exchange."""
        if (codec, dtype) not in self._blocks:
            memory, factors = codec.memory(self.error_feedback), self._factors(codec)
            world, state = self.network.world_size, self.state
            kernels = Kernels(codec, memory=memory, factors=factors, world_size=world)
            by_owners = EXCHANGES[codec.exchange].reduced_by == "owners"
            in_tables = self.tables and by_owners and memory.in_tables
            tables = kernels_of(codec, dtype=dtype) if in_tables else None
            plan = BlockPlan(codec, dtype, kernels, self.network, state, self._payloads, tables)
            self._blocks[codec, dtype] = plan
        return self._blocks[codec, dtype]
