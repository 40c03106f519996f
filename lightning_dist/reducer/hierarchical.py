"""A chunk that is reduced inside a host before it crosses to the others.

    bucket -> all_to_all inside -> mean of the host's ranks, on this rank's share
           -> any chunk, between hosts -> mean of all
           -> all_gather inside -> bucket

The chunks between hosts are those of a flat exchange, on the share instead of the bucket, among one
rank of each host. So state belongs to a share and not to a rank's whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.codecs.base import Payload
from lightning_dist.exchange.shares import Shares
from lightning_dist.exchange.traffic import Sent
from lightning_dist.reducer.chunk import Chunk, begun, settle_all
from lightning_dist.reducer.kernels import Kernels
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
        self._inside, self._exchange = inside, exchange
        self._parts, self._own, self._share, self._across = parts, own, share, across
        self._one = torch.ones((), dtype=torch.float32, device=share.device)
        self._true = torch.ones((), dtype=torch.bool, device=share.device)

    @override
    def begin(self) -> None:
        for pieces, payload in zip(self._parts, self._exchange.own, strict=True):
            self._encode(self._inside.up, pieces, payload)
        self._exchange.issue()

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        self._exchange.wait()
        self._decode(self._inside.up, self._own, self._exchange.received)
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
    def settle(self, scale: Tensor, ok: Tensor) -> None:
        settle_all(self._across, scale, ok)
        self._encode(self._inside.down, self._own, self._exchange.mine)
        self._exchange.spread()

    @override
    def finish(self) -> None:
        self._exchange.wait()
        for pieces, payload in zip(self._parts, self._exchange.results, strict=True):
            self._decode(self._inside.down, pieces, [payload])

    @property
    @override
    def sent(self) -> Sent:
        return sum((chunk.sent for chunk in self._across), self._exchange.sent)

    @property
    @override
    def nbytes(self) -> int:
        return self._share.nbytes + sum(chunk.nbytes for chunk in self._across)

    def _encode(self, kernels: Kernels, pieces: Sequence[Piece], payload: Payload) -> None:
        for piece in pieces:
            piece.load()
            kernels.encode(piece.grad, (), self._one, None, columns_of(payload, piece.columns))

    def _decode(
        self, kernels: Kernels, pieces: Sequence[Piece], payloads: Sequence[Payload]
    ) -> None:
        for piece in pieces:
            columns = [columns_of(payload, piece.columns) for payload in payloads]
            own = columns[0]  # of no use where nothing is kept
            kernels.settle(piece.grad, (), self._one, self._true, None, own, columns)
            piece.store()
