"""Plan of one bucket, made once and reused until DDP changes its layout.

bucket -> groups (one codec each) -> units (one exchange each) -> tiles (one kernel call each).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.codecs.memory import Memory
from lightning_dist.codecs.policies import raw_beside
from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.ranks.traffic import ring_allreduce
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.block import sends_more
from lightning_dist.reducer.plan.flat_planner import FlatPlanner
from lightning_dist.reducer.plan.intra import IntraPlan, share_dtype
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.units import low_rank, sparse, table  # noqa: F401  (their units)
from lightning_dist.reducer.units.base import CodecGroup, CommUnit, JoinedUnit, join
from lightning_dist.reducer.units.block import HierarchicalUnit
from lightning_dist.reducer.units.by_codec import compile_passes, flat_units


class Planner:
    """Builds groups, over a flat network or a hierarchy.

    Args:
        intra_codec: the codec inside a node, where the exchange is hierarchical.
        whole: names of the parameters that some codec needs as they are.
        immediate, tables: as of :class:`.FlatPlanner`.
        divide_last: as there, where the network is flat.

    Attributes:
        flat: what units of the flat network share, or those between nodes; None on ranks that
            leave the latter to others.
    """

    def __init__(
        self,
        network: Network,
        state: ReducerState,
        *,
        memory_of: Callable[[Codec], Memory],
        intra_codec: BlockCodec,
        whole: Collection[str] = (),
        immediate: bool = False,
        tables: bool = True,
        divide_last: bool = False,
    ) -> None:
        self.network, self.state, self.immediate = network, state, immediate
        self.memory_of = memory_of
        self.compiled: dict[Codec, tuple[set[torch.dtype], set[int]]] = {}
        """Dtypes and sizes of the gradients that kernels were compiled for."""
        is_flat = network.intra is None
        flat_network = network if network.intra is None else network.intra.inter
        self.flat: FlatPlanner | None = None
        if flat_network is not None:
            self.flat = FlatPlanner(
                flat_network,
                state,
                memory_of=memory_of,
                immediate=immediate,
                tables=tables,
                divide_last=divide_last and is_flat,
            )
        self._intra: IntraPlan | None = None
        if not is_flat:
            self._intra = IntraPlan(network, intra_codec, self.flat, whole=whole)
        self._inside: list[JoinedUnit] = []  # of the tensor that is planned

    def free(self) -> None:
        """Memory of payloads: what is planned from now on has new ones."""
        if self.flat is not None:
            self.flat.free()

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
        if self.flat is None:
            return
        for each in _with_raw(codec):
            if self._intra is None:
                compile_passes(each, dtypes, self.flat, sizes)
                continue
            parts = [ParameterSlice("", 0, (numel,)) for numel in sizes]
            shares = {share for part in parts for share in self._intra.lengths(part)}
            wide = {share_dtype(each, dtype) for dtype in dtypes}
            for of_shares in _with_raw(each):
                compile_passes(of_shares, wide, self.flat, shares)

    def compile_no_more(self) -> None:
        """Use kernels only that this process has compiled before: all have the same bytes."""
        if self.flat is not None:
            self.flat.compile_no_more()

    @property
    def is_fused(self) -> bool:
        """True if any kernels of the flat network are compiled."""
        return self.flat is not None and self.flat.is_fused

    def kinds(self, codec: Codec) -> Sequence[str]:
        """Kinds of state that differ from rank to rank, under ``codec`` and the user's settings."""
        return self.memory_of(codec).kinds

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
        if self.flat is not None:
            self.flat.restart(turn)
        groups = [self._group(codec, slices, bucket, waits) for codec, slices in cut.items()]
        inside, self._inside = self._inside, []
        if inside:
            join(inside)
        if self.flat is not None:
            self.flat.join()
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
            for held in self.held(codec, part):
                self.state.per_rank(kind, held, dtype=wide, device=self.network.device)
            self.state.adopted(kind, part.name)

    def held(self, codec: Codec, part: ParameterSlice) -> Iterable[ParameterSlice]:
        """Section of ``part`` that this rank owns."""
        return [part] if self._intra is None else self._intra.held(codec, part)

    def units(
        self, codec: Codec, slices: Sequence[ParameterSlice], bucket: Tensor
    ) -> Sequence[CommUnit]:
        """The exchanges of ``slices``, one after the other; those that are joined come later."""
        if self._intra is None:
            assert self.flat is not None
            return flat_units(codec, slices, bucket, self.flat)
        keeps = bool(self.kinds(codec))
        inside = [
            HierarchicalUnit(self._intra, codec, owned, bucket)
            for owned in self._intra.units(codec, slices, keeps=keeps)
        ]
        if self._intra.whole_buckets:
            self._inside += inside
        else:
            for unit in inside:
                join([unit])
        return inside

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that units share."""
        inside = 0 if self._intra is None else self._intra.memory.nbytes
        return inside + (0 if self.flat is None else self.flat.nbytes)


def _with_raw(codec: Codec) -> Iterable[Codec]:
    """``codec``, and what small tensors are given."""
    return dict.fromkeys((codec, raw_beside(codec)))
