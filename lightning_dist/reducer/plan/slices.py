"""Positions and order of the parameters of a bucket, and the codec of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec, Shape


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

    def section(self, start: int, end: int) -> ParameterSlice:
        """Elements ``start`` to ``end``, as they lie in the bucket; itself if these are all."""
        if end - start == self.numel:
            return self
        before, after = self.start + start, self.rest + self.numel - end
        return ParameterSlice(self.name, self.offset + start, (end - start,), before, after)

    def of(self, bucket: Tensor) -> Tensor:
        """The flat view ``(numel,)`` of this parameter in ``bucket``."""
        return bucket[self.offset : self.offset + self.numel]

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of ``flat (numel,)``, which lies as in the bucket, in the shape of the part."""
        if self.strides is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.strides)


def as_real(parameter: Tensor) -> Tensor:
    """The parameter as a bucket holds its gradient: pairs of real numbers where it is complex."""
    return torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter


def strides_in_bucket(parameter: Tensor) -> Shape | None:
    """Strides of the real gradient in the bucket; None: row-major.

    DDP keeps the strides of parameters that are dense in memory, and lays out others row-major.
    """
    real = as_real(parameter)
    if real.is_contiguous():
        return None
    dense = 1
    for stride, size in sorted(zip(real.stride(), real.shape, strict=True)):
        if size > 1 and stride != dense:
            return None
        dense *= size
    return tuple(real.stride())


def slices_of(names: Sequence[str], parameters: Sequence[Tensor]) -> list[ParameterSlice]:
    """Parameters that lie one after the other in a flat tensor."""
    slices = []
    offset = 0
    for name, parameter in zip(names, parameters, strict=True):
        shape = tuple(as_real(parameter).shape)
        slices.append(ParameterSlice(name, offset, shape, strides=strides_in_bucket(parameter)))
        offset += slices[-1].numel
    return slices


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
    of_codecs: dict[Codec, list[ParameterSlice]] = {}
    for part in slices:
        if part.numel:
            codec = affordable(policy.for_tensor(part.name, shapes[part.name], step=step), part)
            of_codecs.setdefault(codec, []).append(part)
    return of_codecs


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


def as_one(run: Sequence[ParameterSlice]) -> ParameterSlice:
    """Neighbours as one slice."""
    return ParameterSlice(run[0].name, run[0].offset, (sum(part.numel for part in run),))


def require_strides(state: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
    """Raise ValueError unless the rows of ``state`` lie in memory as their parameters do."""
    kept = {name for kind in ("residuals", "momenta", "delayed") for name in state.get(kind, ())}
    for parameter, name in names.items():
        there, here = state.get("strides", {}).get(name), strides_in_bucket(parameter)
        if name in kept and (tuple(there) if there else None) != here:
            raise ValueError(
                f"the memory format of {name!r} must be that of the run whose state is loaded, got "
                f"strides {here} instead of {there} (None: row-major); set the same memory format"
            )
