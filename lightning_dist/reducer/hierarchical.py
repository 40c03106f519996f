"""A unit that is reduced inside a host before it crosses to the others.

    bucket -> all_to_all inside -> mean of the host's ranks, on this rank's share
           -> any unit, between hosts -> mean of all
           -> all_gather inside -> bucket

The units between hosts are those of a flat exchange, on the share instead of the bucket, among one
rank of each host. So state belongs to a share and not to a rank's whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.codecs.base import Payload
from lightning_dist.exchange.reduce_scatter import ReduceScatterAllGather
from lightning_dist.exchange.traffic import Sent
from lightning_dist.kernels.passes import Kernels
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.tiles import Tile, columns_of
from lightning_dist.reducer.unit import CommUnit, decode_all, staggered


@dataclass(frozen=True)
class IntraKernels:
    """The two ways inside a host. Nothing is kept of what their codec rounds.

    ``up``: gradients -> mean of the host, weighted. ``down``: mean of all hosts -> gradients.
    """

    up: Kernels
    down: Kernels


class HierarchicalUnit(CommUnit):
    """Parts of one bucket.

    Args:
        parts: for every rank of the host, what it is responsible for, in the bucket.
        own: this rank's part, in the share.
        share: flat, the mean of the host and then of all hosts.
        inter: the units of ``share``; none on ranks that leave the way between hosts to others.
    """

    def __init__(
        self,
        intra_kernels: IntraKernels,
        exchange: ReduceScatterAllGather,
        *,
        parts: Sequence[Sequence[Tile]],
        own: Sequence[Tile],
        share: Tensor,
        inter: Sequence[CommUnit],
    ) -> None:
        self._intra_kernels, self._exchange, self._share, self._inter = (
            intra_kernels,
            exchange,
            share,
            inter,
        )
        # What goes up to every owner, and the place to which its result comes down.
        self._parts = [
            (tile, columns_of(payload, tile.columns))
            for tiles, payload in zip(parts, exchange.own, strict=True)
            for tile in tiles
        ]
        self._own = [
            (
                tile,
                [columns_of(payload, tile.columns) for payload in exchange.received],
                columns_of(exchange.mine, tile.columns),
            )
            for tile in own
        ]
        self._one = torch.ones((), dtype=torch.float32, device=share.device)
        self._true = torch.ones((), dtype=torch.bool, device=share.device)

    @override
    def begin(self) -> None:
        for tile, payload in self._parts:
            self._encode(self._intra_kernels.up, tile, payload)
        self._exchange.start()

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        self._exchange.wait()
        for tile, received, _ in self._own:
            self._decode(self._intra_kernels.up, tile, received)
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
        self._exchange.wait()
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
        for tile, _, mine in self._own:
            self._encode(self._intra_kernels.down, tile, mine)
        self._exchange.spread()

    @override
    def finish(self) -> None:
        self._exchange.wait()
        for tile, result in self._parts:
            self._decode(self._intra_kernels.down, tile, [result])

    @property
    @override
    def sent(self) -> Sent:
        return sum((unit.sent for unit in self._inter), self._exchange.sent)

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
