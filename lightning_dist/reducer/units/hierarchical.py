"""A unit that is reduced inside a host before it crosses to the others.

    bucket -> all_to_all inside -> mean of the host's ranks, on this rank's share
           -> any unit, between hosts -> mean of all
           -> all_gather inside -> bucket

The units between hosts are those of a flat exchange, on the share instead of the bucket, among one
rank of each host. So state belongs to a share and not to a rank's whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.codecs.base import Codec, Payload
from lightning_dist.exchange.rounds import RowExchange, Section, TwoShot
from lightning_dist.exchange.traffic import Sent
from lightning_dist.exchange.wire import row_bytes
from lightning_dist.kernels.triton import Slice, SliceTable
from lightning_dist.kernels.triton.table import Within
from lightning_dist.reducer.plan.intra import IntraKernels, IntraPlan, share_dtype
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.units.base import CommUnit, JoinedUnit, decode_all, join, staggered
from lightning_dist.reducer.units.shares import Cut, shares_of
from lightning_dist.reducer.units.tiles import Tile, decode_tiles, encode_tiles, of_tiles, runs_of

if TYPE_CHECKING:
    from lightning_dist.reducer.plan.planner import Planner


class _InTiles:
    """The passes inside a host, tile by tile; what is not compressed is copied.

    Args:
        owned: slices of ``bucket`` that each rank owns.
        own: those of this rank, as they lie in ``share``.
    """

    def __init__(
        self,
        kernels: IntraKernels,
        section: Section,
        owned: Sequence[Sequence[ParameterSlice]],
        bucket: Tensor,
        own: Sequence[ParameterSlice],
        share: Tensor,
    ) -> None:
        self._kernels, codec = kernels, kernels.up.codec
        is_copied = codec.lossless and codec.block == 1  # the payload is the elements
        self._flats: list[Tensor] = []  # parts of the bucket that travel as they are
        self._places: list[Tensor] = []  # and where, in the payloads
        self._tiles: list[Tile] = []  # the others, and their parts of the payloads
        self._payloads: list[Payload] = []
        for parts, payload in zip(owned, section.payloads, strict=True):
            if is_copied:
                sizes = [part.numel for part in parts]
                self._flats += [part.of(bucket) for part in parts]
                self._places += payload[0].view(-1)[: sum(sizes)].split_with_sizes(sizes)
            else:
                tiles = _runs(parts, bucket, codec.block)
                self._tiles += tiles
                self._payloads += of_tiles(tiles, payload)
        whole = [ParameterSlice("", 0, (share.numel(),))]
        self._own = _runs(whole if is_copied else own, share, codec.block)
        self._means = of_tiles(self._own, section.mean)
        received = [of_tiles(self._own, payload) for payload in section.received]
        self._received = list(zip(*received, strict=True))
        self._one = torch.ones((), dtype=torch.float32, device=bucket.device)

    def up(self) -> None:
        """Bucket -> payload of every owner."""
        if self._flats:
            torch._foreach_copy_(self._places, self._flats)
        encode_tiles(self._kernels.up, self._tiles, self._payloads, self._one)

    def reduce(self) -> None:
        """What was received -> share."""
        decode_tiles(self._kernels.up, self._own, self._received, self._one)

    def down(self) -> None:
        """Share -> own payload."""
        encode_tiles(self._kernels.down, self._own, self._means, self._one)

    def spread(self) -> None:
        """Payload of every owner -> bucket."""
        if self._flats:
            torch._foreach_copy_(self._flats, self._places)
        results = [(payload,) for payload in self._payloads]
        decode_tiles(self._kernels.down, self._tiles, results, self._one)


def _runs(parts: Sequence[ParameterSlice], flat: Tensor, block: int) -> Sequence[Tile]:
    return runs_of(flat.unsqueeze(0), [(part.offset, part.numel) for part in parts], block)


class _InTables:
    """The passes of :class:`_InTiles`, each by one kernel launch."""

    def __init__(
        self,
        kernels: IntraKernels,
        exchange: TwoShot,
        owned: Sequence[Sequence[ParameterSlice]],
        bucket: Tensor,
        own: Sequence[ParameterSlice],
        share: Tensor,
        *,
        blocks: Sequence[int],
        within: Within,
    ) -> None:
        assert kernels.tables is not None
        self._tables, self._exchange, codec = kernels.tables, exchange, kernels.up.codec
        self._bucket, self._share = bucket, share
        self._weight = kernels.up.passes.factors.mean

        rank, device, dtype = exchange.rank, bucket.device, bucket.dtype
        of_ranks = [[Slice(part.name, part.offset, part.numel) for part in row] for row in owned]
        self._every = SliceTable.of(
            codec, of_ranks, blocks=blocks, device=device, dtype=dtype, within=within
        )
        within = Within([within.row_bytes[rank]], [within.before[rank]])
        mine = [[Slice(part.name, part.offset, part.numel) for part in own]]
        self._mine = SliceTable.of(
            codec, mine, blocks=[blocks[rank]], device=device, dtype=dtype, within=within
        )
        self._one = torch.ones((), dtype=torch.float32, device=device)

    def up(self) -> None:
        payload = self._exchange.own_bytes
        self._tables.encode(self._bucket, None, self._one, table=self._every, payload=payload)

    def reduce(self) -> None:
        received = self._exchange.received_bytes
        self._tables.decode(received, self._share, table=self._mine, weight=self._weight)

    def down(self) -> None:
        payload = self._exchange.mean_bytes
        self._tables.encode(self._share, None, self._one, table=self._mine, payload=payload)

    def spread(self) -> None:
        self._tables.decode(self._exchange.payload_bytes, self._bucket, table=self._every)


class HierarchicalUnit(JoinedUnit):
    """Parts of one bucket.

    Args:
        codec: between hosts.
        cuts: the parts, each with the share of every rank of the host.
        kernels: of the codec inside the host.
    """

    exchange: TwoShot

    def __init__(
        self,
        plan: IntraPlan,
        codec: Codec,
        cuts: Sequence[Cut],
        bucket: Tensor,
        *,
        kernels: IntraKernels,
    ) -> None:
        self._plan, self._kernels, self._bucket = plan, kernels, bucket
        intra, inside = plan.intra, kernels.up.codec
        world = intra.topology.world_size
        self._owned = [shares_of(cuts, position) for position in range(world)]
        blocks = [sum(-(-part.numel // inside.block) for part in parts) for parts in self._owned]
        self._blocks = [max(blocks)] * world if plan.padded else blocks
        self._planes = inside.planes(bucket.dtype)
        self.row_bytes = [row_bytes(self._planes, blocks) for blocks in self._blocks]
        self._slices = slices = _one_after_the_other(self._owned[intra.topology.rank])
        wide = share_dtype(codec, bucket.dtype)
        self._share = bucket.new_zeros(sum(part.numel for part in slices), dtype=wide)
        self._inter: Sequence[CommUnit] = ()
        if slices and plan.inter is not None:
            self._inter = plan.inter.units(codec, slices, self._share)
            self.source = self._inter[0].source
        self._inside: _InTiles | _InTables
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
        section = self.exchange.shares(self._planes, self._blocks, before=within.before)
        lie = self._owned, self._bucket, self._slices, self._share
        if self._kernels.tables is None:
            self._inside = _InTiles(self._kernels, section, *lie)
        else:
            self._inside = _InTables(
                self._kernels, self.exchange, *lie, blocks=self._blocks, within=within
            )
        self._sent_inside = section.sent

    @override
    def begin(self) -> None:
        self._inside.up()
        if self.last:
            self.exchange.start()

    @override
    def receive(self) -> None:
        self.exchange.wait()
        self._inside.reduce()

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
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
    def decode_and_commit(self, scale: Tensor) -> None:
        decode_all(self._inter, scale)
        self._inside.down()
        if self.last:
            self.exchange.start_second()

    @override
    def finish(self) -> None:
        self.exchange.wait()
        self._inside.spread()

    @property
    @override
    def sent(self) -> Sent:
        return sum((unit.sent for unit in self._inter), self._sent_inside)

    @property
    @override
    def nbytes(self) -> int:
        return self._share.nbytes + sum(unit.nbytes for unit in self._inter)


def hierarchical_units(
    plan: IntraPlan,
    codec: Codec,
    slices: Sequence[ParameterSlice],
    bucket: Tensor,
    planner: Planner,
) -> Sequence[CommUnit]:
    """The exchanges of ``slices`` of the flat ``bucket (N,)``, with ``codec`` between hosts."""
    keeps = bool(planner.kinds(codec))
    units = [
        HierarchicalUnit(plan, codec, cuts, bucket, kernels=plan.kernels(inside, bucket.dtype))
        for inside, some in plan.codecs_of(slices, bucket.dtype).items()
        for cuts in plan.cuts(codec, some, inside, keeps=keeps)
    ]
    for unit in units:
        planner.joined(unit) if plan.whole_buckets else join([unit])
    return units


def _one_after_the_other(parts: Sequence[ParameterSlice]) -> list[ParameterSlice]:
    """``parts`` as they lie in a tensor of their own."""
    found, offset = [], 0
    for part in parts:
        found.append(replace(part, offset=offset))
        offset += part.numel
    return found
