"""The way of tensors inside a node: what travels together there, and who owns which part of it.

A parameter is cut into fragments, each of which crosses between nodes by itself, and a fragment
into one share for each owner. As with blocks the cut depends on the parameter alone, not on the
bucket or the codec: the state of a part stays on the rank that it was on.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import torch

from lightning_dist.base.exchanges import WHOLE_BUCKET, unit_elements
from lightning_dist.codecs.base import BlockCodec, Codec
from lightning_dist.exchange.rounds import PayloadMemory
from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.flat import FlatPlanner
from lightning_dist.reducer.plan.slices import ParameterSlice, as_one, neighbours

_ALIGN = 512  # elements; every dense codec's block divides it, so that few blocks are broken

Fragment: TypeAlias = tuple[tuple[int, int], ...]
"""Part of a flat parameter: the share ``(start, end)`` of every owner, perhaps an empty one."""

Owned: TypeAlias = Sequence[Sequence[ParameterSlice]]
"""Shares of every rank of the node, in the order of the bucket."""


class IntraPlan:
    """Common state of hierarchical units.

    Args:
        network: whose ranks reduce in its ``intra`` level first.
        codec: inside the node, ``none`` or a cast.
        inter: what units between nodes share; None on ranks that leave these to others.
        whole: names of the parameters that some codec needs as they are.
    """

    def __init__(
        self,
        network: Network,
        codec: BlockCodec,
        inter: FlatPlanner | None,
        *,
        whole: Collection[str],
    ) -> None:
        assert network.intra is not None
        self.intra, self.inter, self.codec, self._whole = network.intra, inter, codec, whole
        self.memory = PayloadMemory(network.device)  # units take turns with it
        self._most = unit_elements(network.rows, whole=network.whole_buckets)

    @property
    def whole_buckets(self) -> bool:
        """Whether units are whole buckets, which share their exchange."""
        return self._most == WHOLE_BUCKET

    @property
    def padded(self) -> bool:
        """Whether all shares travel as the largest: a single collective brings them back."""
        return self.whole_buckets and self.intra.level.owners == self.intra.topology.world_size

    def lengths(self, part: ParameterSlice) -> list[int]:
        """Elements of the shares of ``part``."""
        owners = self.intra.level.owners
        if owners == 1 or part.name in self._whole:
            return [part.numel]
        cuts = fragments(part.name, part.numel, owners=owners, most=self._most, whole=False)
        return [end - start for cut in cuts for start, end in cut if end > start]

    def units(
        self, codec: Codec, slices: Sequence[ParameterSlice], *, keeps: bool
    ) -> Iterator[Owned]:
        """Parts of ``slices`` that are exchanged together.

        Args:
            keeps: whether ranks have state of each parameter.
        """
        owners = self.intra.level.owners
        separate = keeps or not codec.elementwise  # state or blocks belong to one parameter
        owned, filled = self._nothing_owned(), 0
        for part in slices if separate else map(as_one, neighbours(slices)):
            whole = separate and part.name in self._whole
            cut = fragments(part.name, part.numel, owners=owners, most=self._most, whole=whole)
            for fragment in cut:
                numel = sum(end - start for start, end in fragment)
                if filled and filled + numel > owners * self._most and not codec.whole_tensors:
                    yield owned
                    owned, filled = self._nothing_owned(), 0
                filled += numel
                for rank, (start, end) in enumerate(fragment):
                    if end > start:
                        owned[rank].append(part.section(start, end))
        if filled:
            yield owned

    def _nothing_owned(self) -> list[list[ParameterSlice]]:
        return [[] for _ in range(self.intra.topology.world_size)]

    def held(self, codec: Codec, part: ParameterSlice) -> Iterator[ParameterSlice]:
        """Sections of ``part`` of which this rank has the state."""
        if self.inter is not None:
            for owned in self.units(codec, [part], keeps=True):
                yield from owned[self.intra.topology.rank]


def fragments(name: str, numel: int, *, owners: int, most: int, whole: bool) -> Iterator[Fragment]:
    """Cut a parameter of ``numel`` elements.

    Args:
        most: elements of a share.
        whole: one owner takes it all; for codecs of matrices.
    """
    first = zlib.crc32(name.encode()) % owners  # small parameters belong to one rank: take turns
    step = max(numel, 1) if whole else owners * most
    for start in range(0, numel, step):
        end = min(start + step, numel)
        share = end - start if whole else -(-(end - start) // (owners * _ALIGN)) * _ALIGN
        at = [min(start + turn * share, end) for turn in range(owners + 1)]
        turns = [(owner - first) % owners for owner in range(owners)]
        yield tuple((at[turn], at[turn + 1]) for turn in turns)


def share_dtype(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """Wide, so that the codec alone rounds the mean of a node; without one, what is sent anyway."""
    return dtype if codec.lossless else compute_dtype(dtype)
