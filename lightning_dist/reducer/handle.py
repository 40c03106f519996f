"""One flat tensor on its way through the reducer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.futures import Future

from lightning_dist.reducer.chunk import Chunk, Lane
from lightning_dist.reducer.policy import Slot


@dataclass(eq=False)  # tensors are compared by identity
class Handle:
    """What :meth:`Reducer.start` returns; ``done`` is ready with ``flat`` when the mean is in it.

    Args:
        key: of the tensor among those of a step.
        flat: ``(N,)``, local values in, mean over ranks out.
        slices: where every parameter lies in ``flat``.
        absent: names of slices without a value on this rank.
    """

    key: int
    flat: Tensor
    slices: Sequence[Slot]
    absent: frozenset[str]
    done: Future[Tensor]
    lanes: Sequence[Lane] = ()
    _kept: Mapping[str, Tensor] = field(default_factory=dict)

    def chunks(self) -> list[Chunk]:
        """All exchanges of the tensor, in their order."""
        return [chunk for lane in self.lanes for chunk in lane.chunks]

    def keep_absent(self) -> None:
        """Remember what absent slices hold: an adapter may want it back."""
        self._kept = {
            slot.name: slot.of(self.flat).clone()
            for lane in self.lanes
            for slot in lane.slots
            if slot.name in self.absent
        }

    def restore(self, lane: Lane, absent: set[str]) -> None:
        """Put back what the slices of ``lane`` that are ``absent`` on every rank have held."""
        for slot in lane.slots:
            if slot.name in absent:
                slot.of(self.flat).copy_(self._kept[slot.name])
