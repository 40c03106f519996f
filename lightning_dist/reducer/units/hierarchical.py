"""A unit that is reduced inside a node before it crosses to the others.

    bucket -> all_to_all inside -> mean of the node's ranks, on this rank's share
           -> any unit, between nodes -> mean of all
           -> all_gather inside -> bucket

The units between nodes are those of a flat exchange, on the share instead of the bucket, among one
rank of each node. So state belongs to a share and not to a rank's whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.base.private import copy_all
from lightning_dist.codecs.base import Codec
from lightning_dist.exchange.rounds import RowExchange, TwoShot, row_bytes
from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.kernels.triton.table import Within
from lightning_dist.ranks.traffic import Sent
from lightning_dist.reducer.plan.intra import IntraPlan, Owned, share_dtype
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.units.base import CommUnit, JoinedUnit, decode_all, staggered
from lightning_dist.reducer.units.by_codec import flat_units


class HierarchicalUnit(JoinedUnit):
    """Parts of one bucket.

    Args:
        codec: between nodes.
        owned: the parts, by the rank of the node that owns them.
    """

    exchange: TwoShot

    def __init__(self, plan: IntraPlan, codec: Codec, owned: Owned, bucket: Tensor) -> None:
        self._plan, self._bucket, self._owned = plan, bucket, owned
        world, (plane,) = plan.intra.topology.world_size, plan.codec.planes(bucket.dtype)
        self._dtype = plane.dtype
        self._sizes = [sum(part.numel for part in parts) for parts in owned]
        sent = [max(self._sizes)] * world if plan.padded else self._sizes
        self.row_bytes = [row_bytes([plane], size) for size in sent]
        slices = _one_after_the_other(owned[plan.intra.topology.rank])
        wide = share_dtype(codec, bucket.dtype)
        self._share = bucket.new_zeros(sum(part.numel for part in slices), dtype=wide)
        self._inter: Sequence[CommUnit] = ()
        if slices and plan.inter is not None:
            self._inter = flat_units(codec, slices, self._share, plan.inter)
            self.source = self._inter[0].source
        self._true = torch.ones((), dtype=torch.bool, device=bucket.device)

    @override
    def make_exchange(self, row_bytes: Sequence[int]) -> RowExchange:
        intra, memory = self._plan.intra, self._plan.memory
        memory.restart()
        return TwoShot(
            row_bytes,
            channel=intra.data,
            topology=intra.topology,
            device=self._bucket.device,
            allocate=memory.take,
        )

    @override
    def place(self, within: Within) -> None:
        exchange, rank, dtype = self.exchange, self.exchange.rank, self._dtype

        def view(memory: Tensor, owner: int) -> Tensor:
            start, size = within.before[owner], self._sizes[owner]
            if not size:  # strides of nothing need not fit
                return memory.new_empty((*memory.shape[:-1], 0), dtype=dtype)
            return memory[..., start : start + size * dtype.itemsize].view(dtype)

        payloads = [view(part, owner) for owner, part in enumerate(exchange.parts)]
        self._mean = payloads[rank]
        self._received = view(exchange.received_bytes, rank)  # (ranks of the node, own share)
        sizes = [[part.numel for part in parts] for parts in self._owned]
        # Parts of the bucket, and where they are in the payloads.
        self._flats = [part.of(self._bucket) for parts in self._owned for part in parts]
        pairs = zip(payloads, sizes, strict=True)
        self._places = [place for all_, of in pairs for place in all_.split_with_sizes(of)]
        self._sent_inside = exchange.sent_for(self.row_bytes)

    @override
    def begin(self) -> None:
        copy_all(self._places, self._flats)
        if self.last:
            self.exchange.start()

    @override
    def receive(self) -> None:
        self.exchange.wait()
        rows, share, weight = self._received, self._share, self._plan.intra.level.weight
        wide = compute_dtype(share.dtype)
        total = share if share.dtype == wide else torch.empty_like(share, dtype=wide)
        if self._plan.whole_buckets:  # one launch for any number of ranks
            torch.sum(rows, 0, dtype=wide, out=total)
        else:  # in rank order, wherever an element is in the share
            total.copy_(rows[0])
            for row in rows[1:]:
                total.add_(row)
        # By whole numbers: a product with a rounded fraction would round twice.
        if weight.denominator != 1:
            total.div_(weight.denominator)
        if weight.numerator != 1:
            total.mul_(weight.numerator)
        if total is not share:
            share.copy_(total)

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        for unit in staggered(self._inter):
            unit.encode(scale, step=step)

    @override
    def finite(self) -> Tensor:
        if not self._inter:
            return self._true  # the rank that received this one's gradient checks it
        return torch.stack([unit.finite() for unit in self._inter]).all()

    @override
    def start(self) -> None:
        for unit in self._inter:
            unit.start()

    @override
    def start_second(self) -> None:
        for unit in self._inter:
            unit.start_second()

    @override
    def wait(self) -> None:
        self.exchange.wait()
        for unit in self._inter:
            unit.wait()

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        decode_all(self._inter, scale)
        self._mean.copy_(self._share)
        if self.last:
            self.exchange.start_second()

    @override
    def finish(self) -> None:
        self.exchange.wait()
        copy_all(self._flats, self._places)

    @property
    @override
    def sent(self) -> Sent:
        return sum((unit.sent for unit in self._inter), self._sent_inside)

    @property
    @override
    def nbytes(self) -> int:
        return self._share.nbytes + sum(unit.nbytes for unit in self._inter)


def _one_after_the_other(parts: Sequence[ParameterSlice]) -> list[ParameterSlice]:
    """``parts`` as they lie in a tensor of their own."""
    found, offset = [], 0
    for part in parts:
        found.append(replace(part, offset=offset))
        offset += part.numel
    return found
