"""What travels together: pieces of gradients, their exchange and their kernels.

Chunks exist to overlap: on gloo one large all_to_all reaches 59 % of the link, eight asynchronous
ones 96 %, and one chunk is encoded while another travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec, Payload
from lightning_dist.exchange.rounds import Exchange, TwoShot
from lightning_dist.exchange.traffic import Sent
from lightning_dist.reducer.kernels import Kernels
from lightning_dist.reducer.policy import Slot


@dataclass
class Piece:
    """Views of one parameter's part of a chunk; ``staged`` where rows are not filled."""

    name: str
    grad: Tensor  # (rows, blocks, block)
    residual: Tensor | None
    columns: slice  # blocks of the chunk's payload
    staged: Sequence[tuple[Tensor, Tensor]] = ()  # (where it lives, its place in the staging copy)

    def load(self) -> None:
        if self.staged:
            self.grad.zero_()
            if self.residual is not None:
                self.residual.zero_()
            torch._foreach_copy_([copy for _, copy in self.staged], [at for at, _ in self.staged])

    def store(self) -> None:
        if self.staged:
            torch._foreach_copy_([at for at, _ in self.staged], [copy for _, copy in self.staged])


class Chunk:
    """Pieces that travel together."""

    def __init__(self, pieces: Sequence[Piece], exchange: Exchange, kernels: Kernels) -> None:
        self.pieces, self.exchange, self.kernels = pieces, exchange, kernels
        self._own = [_columns(exchange.own, piece.columns) for piece in pieces]
        self._payloads = [
            tuple(_columns(payload, piece.columns) for payload in exchange.payloads)
            for piece in pieces
        ]
        # An exchange on the bucket's own memory needs no decoding back into it.
        self._in_place = exchange.own[0].data_ptr() == pieces[0].grad.data_ptr()

    def encode(self, scale: Tensor) -> None:
        for piece, own in zip(self.pieces, self._own, strict=True):
            piece.load()
            self.kernels.encode(piece.grad, piece.residual, scale, own)

    def finite(self) -> Tensor:
        """0-d bool, between :meth:`encode` and the exchange."""
        return self.kernels.codec.finite(self.exchange.own)

    def settle(self, scale: Tensor, ok: Tensor, rank: int) -> None:
        self.exchange.wait()
        if self._in_place:
            return
        for piece, own, payloads in zip(self.pieces, self._own, self._payloads, strict=True):
            self.kernels.settle(piece.grad, piece.residual, scale, ok, own, payloads)
            if piece.residual is not None and isinstance(self.exchange, TwoShot):
                shards = _columns(self.exchange.shards, piece.columns)
                mean = _columns(self.exchange.mean, piece.columns)
                row = piece.residual[rank : rank + 1]
                self.kernels.carry(row, scale, ok, shards, mean)
            piece.store()


@dataclass
class Lane:
    """The parameters of a bucket that share a codec."""

    codec: Codec
    slots: Sequence[Slot]
    chunks: Sequence[Chunk]
    keeps_residual: bool
    raw_bytes: int  # what DDP itself would send for these parameters
    sent: Sent


def _columns(payload: Payload, columns: slice) -> Payload:
    return tuple(plane[:, columns] for plane in payload)
