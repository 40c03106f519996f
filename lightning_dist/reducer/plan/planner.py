"""Plans of tensors, such as DDP's buckets, made once for each layout, and tensors in flight.

bucket -> groups (one codec each) -> units (one exchange each) -> tiles (one kernel call each).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_dist.base.accelerator import is_accelerator
from lightning_dist.codecs.base import Codec, Shape
from lightning_dist.codecs.none import NoCompression
from lightning_dist.codecs.policies import raw_beside
from lightning_dist.exchange.rounds import PayloadMemory
from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.ranks.traffic import ring_allreduce
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.flat import FlatPlanner, sends_more
from lightning_dist.reducer.plan.intra import IntraPlan, share_dtype
from lightning_dist.reducer.plan.slices import ParameterSlice, by_codec, matrices
from lightning_dist.reducer.state import ReducerState, StateCopy
from lightning_dist.reducer.units import low_rank, sparse, table  # noqa: F401  (their units)
from lightning_dist.reducer.units.base import CodecGroup, CommUnit, JoinedUnit, join
from lightning_dist.reducer.units.block import HierarchicalUnit
from lightning_dist.reducer.units.by_codec import compile_passes, flat_units
from lightning_dist.settings.exchange import ExchangeSettings


@dataclass(frozen=True)
class Plan:
    """The groups of a tensor of one ``layout``, with views of ``flat``.

    ``moves``: how often the tensor has been in other memory; from the second time on ``flat`` is
    memory of the reducer, to which it is copied. ``before``: for the state before a step.
    """

    layout: object
    flat: Tensor
    groups: Sequence[CodecGroup]
    moves: int
    before: StateCopy


def future_on(device: torch.device) -> Future[Any]:
    """Future of tensors on ``device``: a wait for it orders streams."""
    return Future(devices=[device] if is_accelerator(device) else [])


@dataclass(eq=False)  # tensors are compared by identity
class Handle:
    """Result of :meth:`Reducer.start`; ``done`` is ready with ``given`` when the mean is in it.

    Args:
        key: of the tensor among those of a step.
        given: ``(N,)``, local values in, mean over ranks out.
        slices: where every parameter lies in ``flat``.
        absent: names of slices without a value on this rank.
    """

    key: int
    given: Tensor
    slices: Sequence[ParameterSlice]
    absent: frozenset[str] = frozenset()
    done: Future[Tensor] = field(init=False)
    flat: Tensor = field(init=False, repr=False)  # in flight: where its groups are planned for
    groups: Sequence[CodecGroup] = ()
    before: StateCopy | None = field(default=None, repr=False)
    _kept: Sequence[tuple[ParameterSlice, Tensor]] = ()

    def __post_init__(self) -> None:
        self.done = future_on(self.given.device)

    def units(self) -> list[CommUnit]:
        """All exchanges of the tensor, in their order."""
        return [unit for group in self.groups for unit in group.units]

    def load(self, plan: Plan, *, keeps_state: bool = False) -> None:
        """Copy the values in, and keep a copy of absent slices, for :meth:`restore`.

        Args:
            keeps_state: keep a copy of the state of the groups, for :meth:`undo`.
        """
        self.flat, self.groups = plan.flat, plan.groups
        if keeps_state:
            if not plan.before.is_current:
                plan.before.take()
            self.before = plan.before
            self.before.is_current = False
        if self.flat.data_ptr() != self.given.data_ptr():
            self.flat.copy_(self.given)
        absent = [part for part in self.slices if part.name in self.absent]
        self._kept = [(part, part.of(self.flat).clone()) for part in absent]

    def restore(self, absent: Collection[str]) -> None:
        """Restore the slices that are ``absent`` on every rank."""
        for part, kept in self._kept:
            if part.name in absent:
                part.of(self.flat).copy_(kept)

    def undo(self) -> None:
        """Restore the state of before the step, if it was kept."""
        if self.before is not None:
            self.before.restore()

    def keep(self) -> None:
        """Copy the state for the next step, so that it does not wait for that."""
        if self.before is not None:
            self.before.take()
            self.before.is_current = True

    def store(self) -> None:
        """Copy the mean to the tensor that was given."""
        if self.flat.data_ptr() != self.given.data_ptr():
            self.given.copy_(self.flat)


class Planner:
    """Plans of tensors, over a flat network or a hierarchy, by the key of each tensor.

    Args:
        settings: have the codecs, and what is kept of their errors.
        shapes: of the parameters, by name.
        immediate: as of :class:`.FlatPlanner`.
        sharded: tensors are shards, with elements that are of no parameter, over a flat network.

    Attributes:
        flat: what units of the flat network share, or those between nodes; None on ranks that
            leave the latter to others.
    """

    def __init__(
        self,
        network: Network,
        state: ReducerState,
        settings: ExchangeSettings,
        shapes: Mapping[str, Shape] = {},
        *,
        immediate: bool = False,
        sharded: bool = False,
    ) -> None:
        self.network, self.state, self.immediate = network, state, immediate
        self.memory_of = settings.memory_of
        self.compiled: dict[Codec, tuple[set[torch.dtype], set[int]]] = {}
        """Dtypes and sizes of the gradients that kernels were compiled for."""
        self._policy, self._shapes, self._sharded = settings.policy, shapes, sharded
        flat_network = network if network.intra is None else network.intra.inter
        self.flat: FlatPlanner | None = None
        if flat_network is not None:
            self.flat = FlatPlanner(
                flat_network, state, settings, immediate=immediate, divide_last=sharded
            )
        self._intra: IntraPlan | None = None
        if network.intra is not None:
            whole = matrices(self._policy, shapes)
            self._intra = IntraPlan(network, settings.intra, self.flat, whole=whole)
        self._inside: list[JoinedUnit] = []  # of the tensor that is planned
        self._plans: dict[int, Plan] = {}
        self._staging = PayloadMemory(network.device)  # of tensors that are elsewhere at each step

    def find(
        self,
        key: int,
        flat: Tensor,
        slices: Sequence[ParameterSlice],
        *,
        step: int,
        turn: int,
        waiting: bool,
    ) -> Plan:
        """The plan of ``flat (N,)`` at ``step``; ``waiting``: nothing is compressed yet."""
        policy = NoCompression() if waiting else self._policy
        layout = (tuple(slices), flat.dtype, waiting, policy.phase(step), turn)
        plan, moves = self._plans.get(key), 0
        if plan is not None and plan.layout == layout:
            if plan.moves > 1 or plan.flat.data_ptr() == flat.data_ptr():
                return plan
            moves = plan.moves + 1
            if moves > 1:  # it may well be elsewhere in the next step, too
                # Under the immediate update tensors of one turn are never in flight together.
                place = turn if self.immediate else key
                flat = self._staging.at(place, flat.nbytes).view(flat.dtype)
        elif plan is not None:
            # The tensors lie in another way now (DDP has rebuilt its buckets), or the policy
            # changes: free what belonged to the old ones.
            self.clear()
            if self.flat is not None:
                self.flat.payloads.clear()
        # An element that no slice has would keep the local gradient, and replicas drift apart.
        elements = sum(part.numel for part in slices)
        assert self._sharded or elements == flat.numel(), (
            f"a tensor has {flat.numel()} elements and its slices "
            f"{', '.join(part.name for part in slices)} have {elements}; this is a bug of "
            "lightning_dist, please report it"
        )
        cut = self.by_codec(slices, flat.dtype, step=step, policy=policy)
        groups = self.groups(cut, flat, turn=turn, waits=waiting)
        names = list(dict.fromkeys(part.name for part in slices))
        self._plans[key] = Plan(layout, flat, groups, moves, StateCopy(self.state, names))
        return self._plans[key]

    def by_codec(
        self,
        slices: Sequence[ParameterSlice],
        dtype: torch.dtype,
        *,
        step: int,
        policy: Codec | None = None,
    ) -> Mapping[Codec, Sequence[ParameterSlice]]:
        """Slices of a tensor of ``dtype`` by the codec of each at ``step``.

        Args:
            policy: in the place of that of the settings.
        """
        affordable = partial(self.affordable, dtype=dtype)
        chosen = self._policy if policy is None else policy
        return by_codec(chosen, slices, self._shapes, step=step, affordable=affordable)

    def clear(self) -> None:
        """Drop all plans, for instance because state was moved."""
        self._plans.clear()
        self._staging.clear()

    @property
    def planned(self) -> list[CodecGroup]:
        """Groups of all tensors that have a plan."""
        return [group for plan in self._plans.values() for group in plan.groups]

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
        for given in _with_raw(codec):
            if self._intra is None:
                compile_passes(given, dtypes, self.flat, sizes)
                continue
            parts = [ParameterSlice("", 0, (numel,)) for numel in sizes]
            shares = {share for part in parts for share in self._intra.lengths(part)}
            wide = {share_dtype(given, dtype) for dtype in dtypes}
            for of_shares in _with_raw(given):
                compile_passes(of_shares, wide, self.flat, shares)

    def compile_no_more(self) -> None:
        """Use kernels only that this process has compiled before: all have the same bytes."""
        if self.flat is not None:
            self.flat.compiles = False

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
        ranks = self.network.rows
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
            self.flat.payloads.restart(turn)
        groups = [self._group(codec, slices, bucket, waits) for codec, slices in cut.items()]
        inside, self._inside = self._inside, []
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

    def reserve(self, slices: Sequence[ParameterSlice], dtype: torch.dtype, *, step: int) -> None:
        """Allocate the state that this rank keeps for ``slices``, before they are planned.

        Args:
            dtype: of the tensors that they are slices of.
            step: under whose codecs.
        """
        wide = compute_dtype(dtype)
        for codec, parts in self.by_codec(slices, dtype, step=step).items():
            for part, kind in product(parts, self.kinds(codec)):
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
        """Bytes of all buffers."""
        units = sum(unit.nbytes for group in self.planned for unit in group.units)
        copies = sum(plan.before.nbytes for plan in self._plans.values())
        inside = 0 if self._intra is None else self._intra.memory.nbytes
        shared = 0 if self.flat is None else self.flat.payloads.nbytes
        return units + self._staging.nbytes + copies + inside + shared


def _with_raw(codec: Codec) -> Iterable[Codec]:
    """``codec``, and what small tensors are given."""
    return dict.fromkeys((codec, raw_beside(codec)))
