"""How the parameters of a group are cut into units of fragments, and those into shares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist.exchange.reduce_scatter import ReduceScatterAllGather
from lightning_dist.reducer.fragments import Fragment, fragments
from lightning_dist.reducer.geometry import Grid
from lightning_dist.reducer.hierarchical import HierarchicalUnit, IntraKernels
from lightning_dist.reducer.network import IntraLevel
from lightning_dist.reducer.scratch import Scratch
from lightning_dist.reducer.slices import ParameterSlice, neighbours
from lightning_dist.reducer.tiles import Tile, tile_of
from lightning_dist.reducer.unit import CommUnit

_Cut = tuple[ParameterSlice, Fragment]


@dataclass(frozen=True)
class SharePlan:
    """Hierarchical units of one group.

    ``inter``: flat units of slices of a share, see ``Planner.units``. ``whole``: names of the
    parameters that one rank takes on as they are. ``separate``: parameters must not be joined,
    because blocks or state belong to one.
    """

    intra_kernels: IntraKernels
    intra: IntraLevel
    inter: Callable[[Sequence[ParameterSlice], Tensor], Sequence[CommUnit]]
    scratch: Scratch
    whole: Collection[str]
    separate: bool
    most: int  # elements of a share on the way between hosts
    together: bool  # all that a bucket has in one unit

    def units(
        self, slices: Sequence[ParameterSlice], bucket: Tensor, *, share_dtype: torch.dtype
    ) -> list[HierarchicalUnit]:
        return [self._unit(cuts, bucket, share_dtype) for cuts in self._cuts(slices)]

    def own_shares(self, part: ParameterSlice) -> list[ParameterSlice]:
        """What this rank takes of ``part``, which is joined with no other."""
        rank = self.intra.topology.rank
        return [share for cuts in self._cuts([part]) for share in _slices_of_share(_of(cuts, rank))]

    def _cuts(self, slices: Sequence[ParameterSlice]) -> Iterator[list[_Cut]]:
        intra, cuts, filled = self.intra, list[_Cut](), 0
        most = intra.beyond * self.most
        for part in slices if self.separate else map(_joined, neighbours(slices)):
            for fragment in fragments(
                part.name,
                part.numel,
                members=intra.topology.world_size,
                owners=intra.owners,
                most=most,
                whole=part.name in self.whole and self.separate,
                beyond=intra.beyond,
            ):
                if cuts and filled + fragment.numel > intra.owners * most and not self.together:
                    yield cuts
                    cuts, filled = [], 0
                cuts.append((part, fragment))
                filled += fragment.numel
        if cuts:
            yield cuts

    def _unit(
        self, cuts: Sequence[_Cut], bucket: Tensor, share_dtype: torch.dtype
    ) -> HierarchicalUnit:
        topology, codec = self.intra.topology, self.intra_kernels.up.codec
        parts: list[list[Tile]] = []
        blocks = []
        for rank in range(topology.world_size):
            flats = [
                (part.name, bucket[part.offset + start : part.offset + end])
                for part, (start, end) in _of(cuts, rank)
            ]
            tiles, count = _tiles(flats, codec.block)
            parts.append(tiles)
            blocks.append(count)
        slices = _slices_of_share(_of(cuts, topology.rank))
        share = bucket.new_zeros(sum(part.numel for part in slices), dtype=share_dtype)
        own, _ = _tiles([(part.name, part.of(share)) for part in slices], codec.block)
        planes = codec.planes(bucket.dtype)
        send, receive = self.scratch.take(
            *ReduceScatterAllGather.sizes(planes, blocks, rank=topology.rank)
        )
        exchange = ReduceScatterAllGather(
            planes,
            blocks,
            channel=self.intra.data,
            topology=topology,
            send=send,
            receive=receive,
        )
        inter = self.inter(slices, share) if slices else ()
        return HierarchicalUnit(
            self.intra_kernels, exchange, parts=parts, own=own, share=share, inter=inter
        )


def _of(cuts: Sequence[_Cut], rank: int) -> list[tuple[ParameterSlice, tuple[int, int]]]:
    """What ``rank`` is responsible for, without empty shares."""
    shares = [(part, fragment.shares[rank]) for part, fragment in cuts]
    return [(part, (start, end)) for part, (start, end) in shares if end > start]


def _slices_of_share(
    parts: Sequence[tuple[ParameterSlice, tuple[int, int]]],
) -> list[ParameterSlice]:
    slices, offset = [], 0
    for part, (start, end) in parts:
        whole = end - start == part.numel
        shape = part.shape if whole else (end - start,)
        before, after = part.start + start, part.rest + part.numel - end
        strides = part.strides if whole else None
        slices.append(
            ParameterSlice(part.name, offset, shape, start=before, rest=after, strides=strides)
        )
        offset += end - start
    return slices


def _tiles(flats: Sequence[tuple[str, Tensor]], block: int) -> tuple[list[Tile], int]:
    """Flat tensors one after the other in a payload, and how many blocks they take."""
    tiles, blocks = [], 0
    for name, flat in flats:
        grid = Grid(flat.numel(), 1, block)
        for span in grid.spans(grid.blocks_per_row):
            at = slice(blocks + span.first, blocks + span.last)
            tiles.append(tile_of(name, [flat], span, columns=at, numbers=flat.new_empty(0)))
        blocks += grid.blocks_per_row
    return tiles, blocks


def _joined(run: Sequence[ParameterSlice]) -> ParameterSlice:
    """Neighbours as one."""
    return ParameterSlice(run[0].name, run[0].offset, (sum(part.numel for part in run),))
