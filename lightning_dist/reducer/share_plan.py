"""How the parameters of a lane are cut into chunks of fragments, and those into shares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist.exchange.shares import Shares
from lightning_dist.reducer.chunk import Chunk
from lightning_dist.reducer.fragments import Fragment, fragments
from lightning_dist.reducer.geometry import Grid
from lightning_dist.reducer.hierarchical import HierarchicalChunk, Inside
from lightning_dist.reducer.network import Within
from lightning_dist.reducer.pieces import Piece, piece_of
from lightning_dist.reducer.policy import Slot, neighbours
from lightning_dist.reducer.scratch import Scratch

_Cut = tuple[Slot, Fragment]


@dataclass(frozen=True)
class SharePlan:
    """Hierarchical chunks of one lane.

    ``across``: flat chunks of slots of a share, see ``Planner.chunks``. ``whole``: names of the
    parameters that one rank takes on as they are. ``separate``: parameters must not be joined,
    because blocks or state belong to one.
    """

    inside: Inside
    within: Within
    across: Callable[[Sequence[Slot], Tensor], Sequence[Chunk]]
    scratch: Scratch
    whole: Collection[str]
    separate: bool
    most: int  # elements of a share on the way between hosts
    together: bool  # all that a bucket has in one chunk

    def chunks(
        self, slots: Sequence[Slot], bucket: Tensor, *, share_dtype: torch.dtype
    ) -> list[HierarchicalChunk]:
        return [self._chunk(cuts, bucket, share_dtype) for cuts in self._cuts(slots)]

    def _cuts(self, slots: Sequence[Slot]) -> Iterator[list[_Cut]]:
        within, cuts, filled = self.within, list[_Cut](), 0
        most = within.beyond * self.most
        for slot in slots if self.separate else map(_joined, neighbours(slots)):
            for fragment in fragments(
                slot.name,
                slot.numel,
                members=within.topology.world_size,
                owners=within.owners,
                most=most,
                whole=slot.name in self.whole and self.separate,
                beyond=within.beyond,
            ):
                if cuts and filled + fragment.numel > within.owners * most and not self.together:
                    yield cuts
                    cuts, filled = [], 0
                cuts.append((slot, fragment))
                filled += fragment.numel
        if cuts:
            yield cuts

    def _chunk(
        self, cuts: Sequence[_Cut], bucket: Tensor, share_dtype: torch.dtype
    ) -> HierarchicalChunk:
        topology, codec = self.within.topology, self.inside.up.codec
        parts: list[list[Piece]] = []
        blocks = []
        for rank in range(topology.world_size):
            flats = [
                (slot.name, bucket[slot.offset + start : slot.offset + end])
                for slot, (start, end) in _of(cuts, rank)
            ]
            pieces, count = _pieces(flats, codec.block)
            parts.append(pieces)
            blocks.append(count)
        slots = _slots_of_share(_of(cuts, topology.rank))
        share = bucket.new_zeros(sum(slot.numel for slot in slots), dtype=share_dtype)
        own, _ = _pieces([(slot.name, slot.of(share)) for slot in slots], codec.block)
        planes = codec.planes(bucket.dtype)
        send, receive = self.scratch.take(*Shares.sizes(planes, blocks, rank=topology.rank))
        exchange = Shares(
            planes,
            blocks,
            channel=self.within.data,
            topology=topology,
            send=send,
            receive=receive,
        )
        across = self.across(slots, share) if slots else ()
        return HierarchicalChunk(
            self.inside, exchange, parts=parts, own=own, share=share, across=across
        )


def _of(cuts: Sequence[_Cut], rank: int) -> list[tuple[Slot, tuple[int, int]]]:
    """What ``rank`` is responsible for, without empty shares."""
    shares = [(slot, fragment.shares[rank]) for slot, fragment in cuts]
    return [(slot, (start, end)) for slot, (start, end) in shares if end > start]


def _slots_of_share(parts: Sequence[tuple[Slot, tuple[int, int]]]) -> list[Slot]:
    slots, offset = [], 0
    for slot, (start, end) in parts:
        whole = end - start == slot.numel
        shape = slot.shape if whole else (end - start,)
        before, after = slot.start + start, slot.rest + slot.numel - end
        strides = slot.strides if whole else None
        slots.append(Slot(slot.name, offset, shape, start=before, rest=after, strides=strides))
        offset += end - start
    return slots


def _pieces(flats: Sequence[tuple[str, Tensor]], block: int) -> tuple[list[Piece], int]:
    """Flat tensors one after the other in a payload, and how many blocks they take."""
    pieces, blocks = [], 0
    for name, flat in flats:
        grid = Grid(flat.numel(), 1, block)
        for span in grid.spans(grid.blocks_per_row):
            at = slice(blocks + span.first, blocks + span.last)
            pieces.append(piece_of(name, [flat], span, columns=at, numbers=flat.new_empty(0)))
        blocks += grid.blocks_per_row
    return pieces, blocks


def _joined(run: Sequence[Slot]) -> Slot:
    """Neighbours as one."""
    return Slot(run[0].name, run[0].offset, (sum(slot.numel for slot in run),))
