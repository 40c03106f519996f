"""Units of block codecs: tiles of gradients, their exchange and their kernels.

Units exist to overlap: on gloo one large all_to_all reaches 59 % of the link, eight asynchronous
ones 96 %, and one unit is encoded while another travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_dist.exchange.rounds import Exchange, TwoShot
from lightning_dist.kernels.passes import Kernels
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.keys import UnitKeys
from lightning_dist.reducer.placing import placed
from lightning_dist.reducer.tiles import Tile, columns_of
from lightning_dist.reducer.unit import CommUnit


class BlockUnit(CommUnit):
    """Tiles that travel together.

    Args:
        immediate: state is committed when it is encoded, and not when the mean is decoded.
        only_sampled: another unit works on the same memory, so what tiles hold of it is old.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        exchange: Exchange,
        kernels: Kernels,
        *,
        keys: UnitKeys | None,
        rank: int,
        immediate: bool,
        only_sampled: bool = False,
    ) -> None:
        self._only_sampled = only_sampled
        self.tiles, self.exchange, self.kernels = tiles, exchange, kernels
        self._keys, self._rank, self._immediate = keys, rank, immediate
        self._own = [columns_of(exchange.own, tile.columns) for tile in tiles]
        self._payloads = [
            tuple(columns_of(payload, tile.columns) for payload in exchange.payloads)
            for tile in tiles
        ]
        # An exchange on the bucket's own memory needs no decoding back into it.
        in_place = exchange.own[0].data_ptr() == tiles[0].grad.data_ptr()
        self._in_place = in_place and kernels.passes.factors.divisor == 1

    def draw(self, step: int) -> None:
        """Keys for ``step``, where the codec rounds at random."""
        if self._keys is not None:
            self._keys.draw(step)

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        self.draw(step)
        now = self._immediate and bool(self.kernels.memory.kinds)
        encode = self.kernels.encode_and_commit if now else self.kernels.encode
        for tile, own in zip(self.tiles, self._own, strict=True):
            tile.load()
            encode(tile.grad, tile.state, scale, self._keys_of(tile), own)
            if now:
                tile.store()

    @override
    def finite(self) -> Tensor:
        return self.kernels.codec.finite(self.exchange.own)

    @override
    def samples(self, sampler: Sampler, scale: Tensor) -> Iterator[CodecSample]:
        for tile, own in zip(self.tiles, self._own, strict=True):
            rows, columns, block = tile.grad.shape
            drawn = sampler.drawn(columns, of=rows * block)
            if not len(drawn):
                continue
            if self._only_sampled:
                tile.load()
            device = tile.grad.device
            at = placed(drawn, device)
            keys, filled = self._keys_of(tile), tile.filled()
            # By number, which the host knows: it would wait for a mask on an accelerator.
            chosen = (
                None
                if filled is None
                else placed(filled[:, drawn].flatten().nonzero().squeeze(-1), device)
            )
            gradient, compensated, sent = self.kernels.passes.inspect(
                tile.grad.index_select(1, at),
                tuple(held.index_select(1, at) for held in tile.state),
                scale,
                None if keys is None else keys.index_select(1, at),
                tuple(plane.index_select(1, at) for plane in own)
                if self.exchange.own_stays
                else None,
                committed=self._immediate,
            )
            residual = None
            if "residual" in self.kernels.memory.kinds:
                residual = partial(self._residual, tile, at, chosen)
            yield CodecSample(
                _chosen(gradient, chosen),
                _chosen(compensated, chosen),
                partial(_chosen, sent, chosen),
                residual,
            )

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        self.wait()
        if self._in_place:
            return
        for tile, own, payloads in zip(self.tiles, self._own, self._payloads, strict=True):
            keys = self._keys_of(tile)
            state = () if self._immediate else tile.state
            self.kernels.decode_and_commit(tile.grad, state, scale, keys, own, payloads)
            if "residual" in self.kernels.memory.kinds and isinstance(self.exchange, TwoShot):
                shards = columns_of(self.exchange.shards, tile.columns)
                mean = columns_of(self.exchange.mean, tile.columns)
                row = tile.state[0][self._rank : self._rank + 1]
                self.kernels.server_feedback(row, scale, shards, mean)
            tile.store()

    def _residual(self, tile: Tile, at: Tensor, chosen: Tensor | None) -> Tensor:
        if self._only_sampled:
            tile.load()
        return _chosen(tile.state[0].index_select(1, at), chosen)

    def _keys_of(self, tile: Tile) -> Tensor | None:
        return None if self._keys is None else self._keys.encode[:, tile.columns]


def _chosen(tensor: Tensor, chosen: Tensor | None) -> Tensor:
    return tensor.flatten() if chosen is None else tensor.flatten().index_select(0, chosen)
