"""Tensors in flight and their plans, made once per layout, for any memory they are in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_dist.base.accelerator import is_accelerator
from lightning_dist.codecs import Codec, NoCompression
from lightning_dist.codecs.base import Shape
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import ParameterSlice, by_codec
from lightning_dist.reducer.state import StateCopy
from lightning_dist.reducer.units.base import CodecGroup, CommUnit


@dataclass(frozen=True)
class TensorPlan:
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

    def load(self, plan: TensorPlan, *, keeps_state: bool = False) -> None:
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


class Plans:
    """Plans by key.

    Args:
        shapes: of the parameters, by name.
        padded: tensors may have elements that are of no parameter.
    """

    def __init__(
        self,
        planner: Planner,
        policy: Codec,
        shapes: Mapping[str, Shape],
        *,
        padded: bool,
    ) -> None:
        self.planner, self._policy, self._shapes = planner, policy, shapes
        self._padded = padded
        self._plans: dict[int, TensorPlan] = {}
        self._staging: dict[int, Tensor] = {}  # uint8 memory by place

    def find(
        self,
        key: int,
        flat: Tensor,
        slices: Sequence[ParameterSlice],
        *,
        step: int,
        turn: int,
        waiting: bool,
    ) -> TensorPlan:
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
                place = turn if self.planner.immediate else key
                flat = self._staged(place, flat.nbytes).view(flat.dtype)
        elif plan is not None:
            # The tensors lie in another way now (DDP has rebuilt its buckets), or the policy
            # changes: free what belonged to the old ones.
            self.clear()
            self.planner.free()
        # An element that no slice has would keep the local gradient, and replicas drift apart.
        elements = sum(part.numel for part in slices)
        assert self._padded or elements == flat.numel(), (
            f"a tensor has {flat.numel()} elements and its slices "
            f"{', '.join(part.name for part in slices)} have {elements}; this is a bug of "
            "lightning_dist, please report it"
        )
        cut = self._by_codec(policy, slices, flat.dtype, step)
        groups = self.planner.groups(cut, flat, turn=turn, waits=waiting)
        names = list(dict.fromkeys(part.name for part in slices))
        before = StateCopy(self.planner.state, names)
        self._plans[key] = TensorPlan(layout, flat, groups, moves, before)
        return self._plans[key]

    def reserve(self, slices: Sequence[ParameterSlice], dtype: torch.dtype, *, step: int) -> None:
        """Allocate what is kept of ``slices`` from ``step`` on, before they are planned."""
        for codec, parts in self._by_codec(self._policy, slices, dtype, step).items():
            self.planner.reserve(codec, parts, dtype)

    def groups(self) -> list[CodecGroup]:
        """Of all tensors."""
        return [group for plan in self._plans.values() for group in plan.groups]

    def clear(self) -> None:
        """Drop all plans, for instance because state was moved."""
        self._plans.clear()
        self._staging = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        own = sum(unit.nbytes for group in self.groups() for unit in group.units)
        staging = sum(memory.nbytes for memory in self._staging.values())
        copies = sum(plan.before.nbytes for plan in self._plans.values())
        return own + self.planner.nbytes + staging + copies

    def _staged(self, place: int, size: int) -> Tensor:
        found = self._staging.get(place)
        if found is None or len(found) < size:  # plans of before keep the smaller one
            device = self.planner.network.device
            found = self._staging[place] = torch.zeros(size, dtype=torch.uint8, device=device)
        return found[:size]

    def _by_codec(
        self,
        policy: Codec,
        slices: Sequence[ParameterSlice],
        dtype: torch.dtype,
        step: int,
    ) -> Mapping[Codec, Sequence[ParameterSlice]]:
        affordable = partial(self.planner.affordable, dtype=dtype)
        return by_codec(policy, slices, self._shapes, step=step, affordable=affordable)
