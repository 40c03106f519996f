"""Where the parameters of a bucket lie, and which codec each of them gets at a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_dist.codecs import Codec
from lightning_dist.codecs.base import Shape


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket."""

    name: str
    offset: int  # elements from the start of the bucket
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, bucket: Tensor) -> Tensor:
        """The flat view ``(numel,)`` of this parameter in ``bucket``."""
        return bucket[self.offset : self.offset + self.numel]


def slots_by_codec(
    policy: Codec, names: Sequence[str], shapes: Sequence[Shape], *, step: int
) -> Mapping[Codec, Sequence[Slot]]:
    """Every parameter of a bucket under the codec that ``policy`` gives it; empty ones not."""
    found: dict[Codec, list[Slot]] = {}
    offset = 0
    for name, shape in zip(names, shapes, strict=True):
        slot = Slot(name, offset, shape)
        offset += slot.numel
        if slot.numel:
            found.setdefault(policy.for_tensor(name, shape, step=step), []).append(slot)
    return found
