"""One flat tensor on its way through the reducer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.futures import Future

from lightning_dist.reducer.plans import Plan
from lightning_dist.reducer.slices import ParameterSlice
from lightning_dist.reducer.unit import CodecGroup, CommUnit


@dataclass(eq=False)  # tensors are compared by identity
class Handle:
    """What :meth:`Reducer.start` returns; ``done`` is ready with ``given`` when the mean is in it.

    Args:
        key: of the tensor among those of a step.
        given: ``(N,)``, local values in, mean over ranks out.
        slices: where every parameter lies in ``flat``.
        absent: names of slices without a value on this rank.
    """

    key: int
    given: Tensor
    slices: Sequence[ParameterSlice]
    absent: frozenset[str]
    done: Future[Tensor]
    groups: Sequence[CodecGroup] = ()
    _kept: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flat = self.given
        """The tensor while it is on its way: where its groups are planned for."""

    def units(self) -> list[CommUnit]:
        """All exchanges of the tensor, in their order."""
        return [unit for group in self.groups for unit in group.units]

    def load(self, plan: Plan) -> None:
        """Take the values, and remember what absent slices hold: an adapter may want it back."""
        self.flat, self.groups = plan.flat, plan.groups
        if self.flat.data_ptr() != self.given.data_ptr():
            self.flat.copy_(self.given)
        self._kept = {
            part.name: part.of(self.flat).clone()
            for group in self.groups
            for part in group.slices
            if part.name in self.absent
        }

    def restore(self, group: CodecGroup, absent: set[str]) -> None:
        """Put back what the slices of ``group`` that are ``absent`` on every rank have held."""
        for part in group.slices:
            if part.name in absent:
                part.of(self.flat).copy_(self._kept[part.name])

    def store(self) -> None:
        """Give back the mean."""
        if self.flat.data_ptr() != self.given.data_ptr():
            self.given.copy_(self.flat)
