"""Fragments of a model that are exchanged in turn, and the anchor that all workers agree on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.reducer.plan.slices import ParameterSlice, as_real, strides_in_bucket
from lightning_dist.sync.fsdp.replicas import local_of


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
    trained: Mapping[str, nn.Parameter], anchors: Mapping[str, nn.Parameter], count: int
) -> list[Fragment]:
    """Fragments of about as many elements each, of parameters that follow each other.

    With fewer parameters than ``count`` the last ones have none.
    """
    # By all elements, not this rank's alone: the cut is equal on all ranks.
    ends = list(accumulate(p.numel() for p in trained.values()))
    middles = [end - p.numel() / 2 for end, p in zip(ends, trained.values(), strict=True)]
    bounds, parts = [0], min(count, len(trained))
    for index in range(1, parts):
        bound = bisect_left(middles, ends[-1] * index / parts)
        # Every fragment before and every one to come needs a parameter.
        bounds.append(min(max(bound, bounds[-1] + 1), len(trained) - parts + index))
    names, bounds = list(trained), [*bounds, *[len(trained)] * (count - parts + 1)]
    return [
        fragment_of({name: trained[name] for name in names[start:end]}, anchors)
        for start, end in pairwise(bounds)
    ]


def fragment_of(
    parameters: Mapping[str, nn.Parameter], anchors: Mapping[str, nn.Parameter]
) -> Fragment:
    """These parameters with their anchors, one after the other in a pseudo-gradient."""
    names, some = list(parameters), list(parameters.values())
    return Fragment(some, [anchors[name] for name in names], slices_of_parts(names, some))


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
