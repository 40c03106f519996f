"""Fragments of a model that are exchanged in turn, and the anchor that all workers agree on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.integrations.torch.fsdp.replicas import local_of
from lightning_dist.reducer.plan.slices import ParameterSlice, as_real, strides_in_bucket


@dataclass
class Fragment:
    """Parameters that are exchanged together, and what all workers agree on of them."""

    parameters: Sequence[nn.Parameter]
    anchors: Sequence[nn.Parameter]  # of this rank's parts, real and in float32 or wider
    slices: Sequence[ParameterSlice]  # of the flat pseudo-gradient of these parts

    @property
    def numel(self) -> int:
        """Elements of the pseudo-gradient on this rank."""
        return sum(part.numel for part in self.slices)

    def rows(self) -> Iterable[tuple[nn.Parameter, nn.Parameter, ParameterSlice]]:
        """Each parameter with its anchor and its place in the pseudo-gradient."""
        return zip(self.parameters, self.anchors, self.slices, strict=True)


def cut(
    trained: Mapping[str, nn.Parameter], count: int, *, offload: bool = False
) -> list[Fragment]:
    """Fragments of about as many elements each, of parameters that follow each other.

    Args:
        offload: anchors are in the host's memory, not where the parameters are.
    """
    if count > len(trained):
        raise ValueError(
            f"fragments must be at most the number of trained parameters, {len(trained)}, got "
            f"{count}"
        )
    wide = all(own_part(p).dtype == torch.float64 for p in trained.values())
    dtype = torch.float64 if wide else torch.float32
    # By all elements, not this rank's alone: the cut is equal on all ranks.
    ends = list(accumulate(p.numel() for p in trained.values()))
    middles = [end - p.numel() / 2 for end, p in zip(ends, trained.values(), strict=True)]
    bounds = [0]
    for index in range(1, count):
        bound = bisect_left(middles, ends[-1] * index / count)
        # Every fragment before and every one to come needs a parameter.
        bounds.append(min(max(bound, bounds[-1] + 1), len(trained) - count + index))
    fragments = []
    for start, end in pairwise([*bounds, len(trained)]):
        names = list(trained)[start:end]
        parameters = [trained[name] for name in names]
        # With the strides of the parameters, which an outer optimizer may keep in its state.
        anchors = [
            nn.Parameter(
                own_part(p).to("cpu" if offload else p.device, dtype, copy=True),
                requires_grad=True,
            )
            for p in parameters
        ]
        fragments.append(Fragment(parameters, anchors, slices_of_parts(names, parameters)))
    return fragments


def own_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, in real numbers; all of it where it is not sharded."""
    return as_real(local_of(parameter.detach()))


def first_row(sharded: DTensor) -> int:
    """Row of a tensor, sharded over one dimension, at which this rank's part begins."""
    mesh, count = sharded.device_mesh, sharded.shape[0]
    return min(mesh.get_local_rank() * -(-count // mesh.size()), count)


def slices_of_parts(names: Sequence[str], parameters: Sequence[Tensor]) -> list[ParameterSlice]:
    """This rank's parts of parameters, one after the other in a flat tensor."""
    found, offset = [], 0
    for name, parameter in zip(names, parameters, strict=True):
        part = own_part(parameter)
        start = rest = 0
        if isinstance(parameter, DTensor):
            row = prod(part.shape[1:])
            start = first_row(parameter) * row
            rest = parameter.shape[0] * row - start - part.numel()
        shape, strides = tuple(part.shape), strides_in_bucket(part)
        found.append(ParameterSlice(name, offset, shape, start, rest, strides))
        offset += part.numel()
    return found
