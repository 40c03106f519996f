"""Where the parameters of a bucket lie, and which codec each of them gets at a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_dist.codecs.base import Codec, Shape
from lightning_dist.reducer.strides import as_real, strides_in_bucket


@dataclass(frozen=True)
class ParameterSlice:
    """The place of a parameter, or of a part of it, in a bucket."""

    name: str
    offset: int  # elements from the start of the bucket
    shape: Shape
    start: int = 0  # elements of the parameter before this part
    rest: int = 0  # and after it
    strides: Shape | None = None  # of a whole parameter in the bucket; None: row-major

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def whole(self) -> int:
        """Elements of the parameter."""
        return self.start + self.numel + self.rest

    def of(self, bucket: Tensor) -> Tensor:
        """The flat view ``(numel,)`` of this parameter in ``bucket``."""
        return bucket[self.offset : self.offset + self.numel]

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of ``flat (numel,)``, which lies as in the bucket, in the shape of the part."""
        if self.strides is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.strides)


def slices_of(names: Sequence[str], parameters: Sequence[Tensor]) -> list[ParameterSlice]:
    """Parameters that lie one after the other in a flat tensor."""
    found = []
    offset = 0
    for name, parameter in zip(names, parameters, strict=True):
        shape = tuple(as_real(parameter).shape)
        found.append(ParameterSlice(name, offset, shape, strides=strides_in_bucket(parameter)))
        offset += found[-1].numel
    return found


def by_codec(
    policy: Codec,
    slices: Sequence[ParameterSlice],
    shapes: Mapping[str, Shape],
    *,
    step: int,
    affordable: Callable[[Codec, ParameterSlice], Codec] = lambda codec, part: codec,
) -> Mapping[Codec, Sequence[ParameterSlice]]:
    """Every slice of a flat tensor under the codec that ``policy`` gives it; empty ones not.

    Args:
        shapes: of the parameters, by name.
        affordable: may answer with another codec.
    """
    found: dict[Codec, list[ParameterSlice]] = {}
    for part in slices:
        if part.numel:
            codec = affordable(policy.for_tensor(part.name, shapes[part.name], step=step), part)
            found.setdefault(codec, []).append(part)
    return found


def matrices(policy: Codec, shapes: Mapping[str, Shape]) -> set[str]:
    """Names of the parameters that some codec of ``policy`` takes as they are, at any step."""
    return {
        name
        for step in policy.boundaries()
        for name, shape in shapes.items()
        if policy.for_tensor(name, shape, step=step).whole_tensors
    }


def neighbours(slices: Sequence[ParameterSlice]) -> list[list[ParameterSlice]]:
    """Slices that lie one after the other in the bucket, together."""
    runs: list[list[ParameterSlice]] = []
    for part in slices:
        if runs and runs[-1][-1].offset + runs[-1][-1].numel == part.offset:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs
