"""A unit that is reduced inside a host before it crosses to the others.

    bucket -> all_to_all inside -> mean of the host's ranks, on this rank's share
           -> any unit, between hosts -> mean of all
           -> all_gather inside -> bucket

The units between hosts are those of a flat exchange, on the share instead of the bucket, among one
rank of each host. So state belongs to a share and not to a rank's whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.codecs.base import Codec, Payload
from lightning_dist.exchange.rounds import ReduceScatterAllGather
from lightning_dist.exchange.traffic import Sent
from lightning_dist.kernels.passes import Kernels
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.intra_plan import IntraKernels, IntraPlan, share_dtype
from lightning_dist.reducer.shares import Cut, shares_of
from lightning_dist.reducer.slices import ParameterSlice
from lightning_dist.reducer.tiles import Grid, Tile, columns_of, tile_of
from lightning_dist.reducer.units import CommUnit, decode_all, staggered


class HierarchicalUnit(CommUnit):
    """Parts of one bucket.

    Args:
        codec: between hosts.
        cuts: the parts, each with the share of every rank of the host.
        kernels: of the codec inside the host.
    """

    exchange: ReduceScatterAllGather

    def __init__(
        self,
        plan: IntraPlan,
        codec: Codec,
        cuts: Sequence[Cut],
        bucket: Tensor,
        *,
        kernels: IntraKernels,
    ) -> None:
        intra, inside = plan.intra, kernels.up.codec
        self._kernels, world = kernels, intra.topology.world_size
        owned = [shares_of(cuts, position) for position in range(world)]
        blocks = [sum(-(-part.numel // inside.block) for part in parts) for parts in owned]
        plan.memory.restart()
        self.exchange = ReduceScatterAllGather(
            inside.planes(bucket.dtype),
            [max(blocks)] * world if plan.padded else blocks,
            channel=intra.data,
            topology=intra.topology,
            device=bucket.device,
            allocate=plan.memory.take,
        )
        slices = _one_after_the_other(owned[intra.topology.rank])
        wide = share_dtype(codec, bucket.dtype)
        self._share = bucket.new_zeros(sum(part.numel for part in slices), dtype=wide)
        self._inter: Sequence[CommUnit] = ()
        if slices and plan.inter is not None:
            self._inter = plan.inter.units(codec, slices, self._share)
        # What goes up to every owner, and the place to which its result comes down.
        flats = [[part.of(bucket) for part in parts] for parts in owned]
        is_copied = inside.lossless and inside.block == 1  # the payload is the elements
        own = [self._share] if is_copied else [part.of(self._share) for part in slices]
        self._flats: list[Tensor] = []  # parts of the bucket that travel as they are
        self._places: list[Tensor] = []  # and where, in the payloads
        self._parts: list[tuple[Tile, Sequence[Payload]]] = []
        for some, payload in zip(flats, self.exchange.payloads, strict=True):
            if is_copied:
                sizes = [len(flat) for flat in some]
                self._flats += some
                self._places += payload[0].view(-1)[: sum(sizes)].split_with_sizes(sizes)
            else:
                self._parts += _tiles(some, inside.block, [payload])
        # What every rank said of the share, and last where its result is encoded.
        payloads = [*self.exchange.received, self.exchange.own]
        self._own = list(_tiles(own, inside.block, payloads))
        self._one = torch.ones((), dtype=torch.float32, device=bucket.device)
        self._true = torch.ones((), dtype=torch.bool, device=bucket.device)

    @override
    def begin(self) -> None:
        if self._flats:
            torch._foreach_copy_(self._places, self._flats)
        for tile, (payload,) in self._parts:
            self._encode(self._kernels.up, tile, payload)
        self.exchange.start()

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        self.exchange.wait()
        for tile, (*received, _) in self._own:
            self._decode(self._kernels.up, tile, received)
        for unit in staggered(self._inter):
            unit.encode(scale, step=step)

    @override
    def finite(self) -> Tensor:
        if not self._inter:
            return self._true  # whoever received this rank's gradient will see it
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
    def samples(self, sampler: Sampler, scale: Tensor) -> Iterator[CodecSample]:
        """Of the mean of the host, on its way to the others; not of what travels inside."""
        for unit in self._inter:
            yield from unit.samples(sampler, scale)

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        decode_all(self._inter, scale)
        for tile, (*_, own) in self._own:
            self._encode(self._kernels.down, tile, own)
        self.exchange.start_second()

    @override
    def finish(self) -> None:
        self.exchange.wait()
        if self._flats:
            torch._foreach_copy_(self._flats, self._places)
        for tile, results in self._parts:
            self._decode(self._kernels.down, tile, results)

    @property
    @override
    def sent(self) -> Sent:
        return sum((unit.sent for unit in self._inter), self.exchange.sent)

    @property
    @override
    def nbytes(self) -> int:
        return self._share.nbytes + sum(unit.nbytes for unit in self._inter)

    def _encode(self, kernels: Kernels, tile: Tile, payload: Payload) -> None:
        tile.load()
        kernels.encode(tile.grad, (), self._one, None, payload)

    def _decode(self, kernels: Kernels, tile: Tile, payloads: Sequence[Payload]) -> None:
        own = payloads[0]  # of no use where nothing is kept
        kernels.decode_and_commit(tile.grad, (), self._one, None, own, payloads)
        tile.store()


def hierarchical_units(
    plan: IntraPlan, codec: Codec, slices: Sequence[ParameterSlice], bucket: Tensor
) -> list[HierarchicalUnit]:
    """The exchanges of ``slices`` of the flat ``bucket (N,)``, with ``codec`` between hosts."""
    return [
        HierarchicalUnit(plan, codec, cuts, bucket, kernels=plan.kernels(inside, bucket.dtype))
        for inside, some in plan.codecs_of(slices, bucket.dtype).items()
        for cuts in plan.cuts(codec, some, inside)
    ]


def _one_after_the_other(parts: Sequence[ParameterSlice]) -> list[ParameterSlice]:
    """``parts`` as they lie in a tensor of their own."""
    found, offset = [], 0
    for part in parts:
        found.append(replace(part, offset=offset))
        offset += part.numel
    return found


def _tiles(
    flats: Sequence[Tensor], block: int, payloads: Sequence[Payload]
) -> Iterator[tuple[Tile, Sequence[Payload]]]:
    """Flat tensors that follow each other in each of ``payloads``, with their places there."""
    first = 0
    for flat in flats:
        grid = Grid(len(flat), 1, block)
        for span in grid.spans(grid.blocks_per_row):
            columns = slice(first + span.first, first + span.last)
            tile = tile_of("", [flat], span, columns=columns, numbers=flat.new_empty(0))
            yield tile, [columns_of(payload, columns) for payload in payloads]
        first += grid.blocks_per_row
