"""Units of block codecs on an accelerator: whole buckets, and one kernel launch for every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.codecs.base import BlockCodec
from lightning_dist.exchange.rounds import AllGather, TwoShot
from lightning_dist.kernels.triton import Slice, SliceTable
from lightning_dist.reducer.block_unit import BlockUnit
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.keys import unit_salts
from lightning_dist.reducer.placing import placed
from lightning_dist.reducer.slices import ParameterSlice
from lightning_dist.reducer.unit import CommUnit

if TYPE_CHECKING:
    from lightning_dist.kernels.triton.passes import TableKernels  # imports Triton


class TableUnit(CommUnit):
    """All that a bucket has of one codec.

    The state of parameters stays where it is, each in memory of its own: the table has places
    relative to the residual with the lowest address.

    Args:
        names: of the slices, for the keys of stochastic codecs.
        residuals: of every slice, flat; none without error feedback.
        exchange: makes one of so many blocks in a row, which calls what it is given to reduce.
        rows: of a payload; this rank reduces row ``rank`` if there are several.
        weight: of each received payload in the mean.
        immediate: state is committed when it is encoded, and not when the mean is decoded.
        eager: makes a unit of the same slices and the same exchange, of which samples are drawn.
    """

    exchange: AllGather | TwoShot

    def __init__(
        self,
        codec: BlockCodec,
        kernels: TableKernels,
        slices: Sequence[ParameterSlice],
        *,
        names: Sequence[str],
        bucket: Tensor,
        residuals: Sequence[Tensor],
        exchange: Callable[[int, Callable[[], None]], AllGather | TwoShot],
        rows: int,
        rank: int,
        weight: float,
        immediate: bool,
        eager: Callable[[AllGather | TwoShot], BlockUnit],
    ) -> None:
        self._codec, self._kernels, self._names, self._bucket = codec, kernels, names, bucket
        self._rank, self._weight, self._immediate = rank, weight, immediate
        self._residuals = residuals  # the table has their places: they must stay
        self._first = min(residuals, key=Tensor.data_ptr) if residuals else None
        self._table = SliceTable.of_rows(
            codec,
            [
                Slice(name, part.offset, part.numel, self._place(i))
                for i, (name, part) in enumerate(zip(names, slices, strict=True))
            ],
            rows=rows,
            device=bucket.device,
        )
        self.exchange = exchange(self._table.columns[0], self._reduce)
        self._finite = torch.ones((), dtype=torch.bool, device=bucket.device)
        self._salts: Tensor | None = None
        self._scale = torch.ones((), dtype=torch.float32, device=bucket.device)
        self._eager = eager
        self._sampled: BlockUnit | None = None
        self._step = 0

    def _place(self, i: int) -> int:
        if self._first is None:
            return 0
        return (self._residuals[i].data_ptr() - self._first.data_ptr()) // self._first.itemsize

    @override
    def encode(self, scale: Tensor, *, step: int) -> None:
        self._scale, self._step = scale, step
        if self._codec.stochastic:
            salts = unit_salts(self._codec, self._names, step=step, rank=self._rank)
            self._salts = placed(salts, self._bucket.device)
        if not self._immediate:
            self._finite.fill_(True)
        self._kernels.encode(
            self._bucket,
            self._first,
            scale,
            table=self._table,
            payload=self.exchange.own_bytes,
            finite=None if self._immediate else self._finite,
            salts=self._salts_of(0),
            commit=self._immediate,
        )

    @override
    def finite(self) -> Tensor:
        return self._codec.finite(self.exchange.own) if self._immediate else self._finite

    def _reduce(self) -> None:
        assert isinstance(self.exchange, TwoShot)
        self._kernels.reduce(
            self.exchange.shard_bytes,
            self.exchange.mean_bytes,
            table=self._table,
            row=self._rank,
            residual=self._first if self._immediate else None,
            scale=self._scale,
            salts=self._salts_of(1),
        )

    @override
    def samples(self, sampler: Sampler, scale: Tensor) -> Iterator[CodecSample]:
        if self._sampled is None:
            self._sampled = self._eager(self.exchange)
        self._sampled.draw(self._step)
        yield from self._sampled.samples(sampler, scale)

    @override
    def decode_and_commit(self, scale: Tensor) -> None:
        self.wait()
        self._decode_and_commit(scale)

    def _decode_and_commit(self, scale: Tensor) -> None:
        if self._first is not None and not self._immediate:
            self._commit(self._first, scale)
        self._kernels.decode(
            self.exchange.payload_bytes, self._bucket, table=self._table, weight=self._weight
        )

    def _commit(self, residual: Tensor, scale: Tensor) -> None:
        table, kernels = self._table, self._kernels
        kernels.commit(self._bucket, residual, scale, table=table, salts=self._salts_of(0))
        if isinstance(self.exchange, TwoShot):
            kernels.server_feedback(
                self.exchange.shard_bytes,
                residual,
                scale,
                table=table,
                row=self._rank,
                salts=self._salts_of(1),
            )

    @property
    @override
    def nbytes(self) -> int:
        return self.exchange.nbytes + self._table.tiles.nbytes

    def compile(self) -> None:
        """Compile the kernels of every pass; nothing else happens."""
        kernels, self._kernels = self._kernels, self._kernels.compiling()
        self.encode(self._scale, step=0)
        if isinstance(self.exchange, TwoShot):
            self._reduce()
        self._decode_and_commit(self._scale)
        self._kernels = kernels

    def _salts_of(self, which: int) -> Tensor | None:
        return None if self._salts is None else self._salts[which]
