"""A chunk that is reduced inside a host before it crosses to the others.

    bucket -> all_to_all inside -> mean of the host's ranks, on this rank's share
           -> any chunk, between hosts -> mean of all
           -> all_gather inside -> bucket

The chunks between hosts are those of a flat exchange, on the share instead of the bucket, among one
rank of each host. So state belongs to a share and not to a rank's whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.codecs.base import Payload
from lightning_dist.exchange.shares import Shares
from lightning_dist.exchange.traffic import Sent
from lightning_dist.kernels.passes import Kernels
from lightning_dist.reducer.chunk import Chunk, begun, settle_all
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.pieces import Piece, columns_of


@dataclass(frozen=True)
class Inside:
    """The two ways inside a host. Nothing is kept of what their codec rounds.

    ``up``: gradients -> mean of the host, weighted. ``down``: mean of all hosts -> gradients.
    """

    up: Kernels
    down: Kernels


class HierarchicalChunk(Chunk):
    """Parts of one bucket.

    Args:
        parts: for every rank of the host, what it is responsible for, in the bucket.
        own: this rank's part, in the share.
        share: flat, the mean of the host and then of all hosts.
        across: the chunks of ``share``; none on ranks that leave the way between hosts to others.
    """

    def __init__(
        self,
        inside: Inside,
        exchange: Shares,
        *,
        parts: Sequence[Sequence[Piece]],
        own: Sequence[Piece],
        share: Tensor,
        across: Sequence[Chunk],
    ) -> None:
        self._inside, self._exchange, self._share, self._across = inside, exchange, share, across
        # What goes up to every owner, and the place to which its result comes down.
        self._parts = [
            (piece, columns_of(payload, piece.columns))
            for pieces, payload in zip(parts, exchange.own, strict=True)
            for piece in pieces
        ]
        self._own = [
            (
                piece,
                [columns_of(payload, piece.columns) for payload in exchange.received],
                columns_of(exchange.mine, piece.columns),
            )
            for piece in own
        ]
        self._one = torch.ones((), dtype=torch.float32, device=share.device)
        self._true = torch.ones((), dtype=torch.bool, device=share.device)

    @override
    def begin(self) -> None:
        for piece, payload in self._parts:
            self._encode(self._inside.up, piece, payload)
        self._exchange.issue()

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        self._exchange.wait()
        for piece, received, _ in self._own:
            self._decode(self._inside.up, piece, received)
        for chunk in begun(self._across):
            chunk.encode(scale, step=step)

    @override
    def finite(self) -> Tensor:
        if not self._across:
            return self._true  # whoever received this rank's gradient will see it
        return torch.stack([chunk.finite() for chunk in self._across]).all()

    @override
    def issue(self) -> None:
        for chunk in self._across:
            chunk.issue()

    @override
    def advance(self) -> None:
        for chunk in self._across:
            chunk.advance()

    @override
    def wait(self) -> None:
        self._exchange.wait()
        for chunk in self._across:
            chunk.wait()

    @override
    def samples(self, sampler: Sampler, scale: Tensor) -> Iterator[CodecSample]:
        """Of the mean of the host, on its way to the others; of no interest is the way inside."""
        for chunk in self._across:
            yield from chunk.samples(sampler, scale)

    @override
    def settle(self, scale: Tensor) -> None:
        settle_all(self._across, scale)
        for piece, _, mine in self._own:
            self._encode(self._inside.down, piece, mine)
        self._exchange.spread()

    @override
    def finish(self) -> None:
        self._exchange.wait()
        for piece, result in self._parts:
            self._decode(self._inside.down, piece, [result])

    @property
    @override
    def sent(self) -> Sent:
        return sum((chunk.sent for chunk in self._across), self._exchange.sent)

    @property
    @override
    def nbytes(self) -> int:
        return self._share.nbytes + sum(chunk.nbytes for chunk in self._across)

    def _encode(self, kernels: Kernels, piece: Piece, payload: Payload) -> None:
        piece.load()
        kernels.encode(piece.grad, (), self._one, None, payload)

    def _decode(self, kernels: Kernels, piece: Piece, payloads: Sequence[Payload]) -> None:
        own = payloads[0]  # of no use where nothing is kept
        kernels.settle(piece.grad, (), self._one, None, own, payloads)
        piece.store()
