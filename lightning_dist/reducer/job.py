"""One bucket on its way through the reducer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor
from torch.futures import Future

from lightning_dist.reducer.chunk import Chunk, Lane
from lightning_dist.reducer.usage import Usage


class Bucket(Protocol):
    """What the reducer needs of ``torch.distributed.GradBucket``."""

    def buffer(self) -> Tensor: ...
    def index(self) -> int: ...
    def is_last(self) -> bool: ...
    def parameters(self) -> list[Tensor]: ...


@dataclass(eq=False)  # buckets are compared by identity
class Job:
    """One bucket on its way."""

    index: int
    is_last: bool
    gradients: Tensor  # (N,) flat: local in, mean over ranks out
    parameters: Sequence[Tensor]
    done: Future[Tensor]
    lanes: Sequence[Lane] = ()
    unused: Mapping[str, Tensor] = field(default_factory=dict)  # gradients to leave as they were

    def chunks(self) -> list[Chunk]:
        return [chunk for lane in self.lanes for chunk in lane.chunks]

    def keep_unused(self, usage: Usage) -> None:
        """Remember the gradients of what no backward has used on this rank: DDP may want them."""
        self.unused = {
            slot.name: slot.of(self.gradients).clone()
            for lane in self.lanes
            for slot in lane.slots
            if slot.name not in usage
        }

    def restore(self, lane: Lane, unused: set[str]) -> None:
        """Put back the gradients of ``lane``'s parameters that no rank has used."""
        for slot in lane.slots:
            if slot.name in unused:
                slot.of(self.gradients).copy_(self.unused[slot.name])
