"""What happens to one bucket, worked out once and reused until DDP changes its layout.

bucket -> lanes (one codec each) -> chunks (one exchange each) -> pieces (one kernel call each).
Chunks exist to overlap: on gloo one large all_to_all reaches 59 % of the link, eight asynchronous
ones 96 %, and one chunk is encoded while another travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.codecs.base import Codec, Payload
from lightning_dist.exchange.rounds import AllReduce, Exchange, Gather, TwoShot
from lightning_dist.exchange.traffic import Sent, ring_allreduce
from lightning_dist.reducer.fusing import Variant, fused_passes
from lightning_dist.reducer.geometry import Grid, Span
from lightning_dist.reducer.kernels import Factors, Kernels, compute_dtype
from lightning_dist.reducer.policy import Slot
from lightning_dist.reducer.residuals import Residuals
from lightning_dist.topology import Topology

CHUNK_ELEMENTS = 1 << 18  # 1 MB of float32 gradient; measured best of 256 Ki and 1 Mi
_LEAST_ROW_ELEMENTS = 1 << 15  # many ranks: larger chunks rather than tiny messages


@dataclass(frozen=True)
class Network:
    """The groups and places that a reducer works with."""

    data: dist.ProcessGroup  # payloads; used by nobody else
    control: dist.ProcessGroup  # a few flags a step, which must not queue behind payloads
    topology: Topology
    device: torch.device

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def rank(self) -> int:
        return self.topology.rank


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


class Planner:
    """Builds lanes; owns one set of kernels per codec and dtype."""

    def __init__(self, network: Network, residuals: Residuals, *, error_feedback: bool) -> None:
        self.network, self._residuals = network, residuals
        self._error_feedback = error_feedback
        self._kernels: dict[tuple[Codec, torch.dtype], Kernels] = {}

    def kernels(self, codec: Codec, dtype: torch.dtype) -> Kernels:
        """Kernels for gradients of ``dtype``."""
        if (codec, dtype) not in self._kernels:
            world = self.network.world_size
            share = 1.0 / world
            factors = Factors(mean=share) if world == 2 else Factors()
            if codec.exchange == "allreduce":
                factors = Factors(encode=share, own=float(world))
            self._kernels[codec, dtype] = Kernels(codec, factors=factors, world_size=world)
        return self._kernels[codec, dtype]

    def fuse(self, codec: Codec, dtypes: Iterable[torch.dtype]) -> None:
        """Compile the kernels of ``codec`` for gradients of ``dtypes``."""
        for dtype in dtypes:
            kernels = self.kernels(codec, dtype)
            variant = Variant(
                kernels.passes,
                dtype=dtype,
                rows=self.rows(codec),
                residual=self._error_feedback and not codec.lossless,
                device=self.network.device,
            )
            kernels.use(fused_passes(variant))

    def rows(self, codec: Codec) -> int:
        """Two ranks and linear codecs exchange whole payloads, otherwise one row per rank."""
        world = self.network.world_size
        return world if codec.exchange == "two_shot" and world > 2 else 1

    def lane(self, codec: Codec, slots: Sequence[Slot], bucket: Tensor) -> Lane:
        """``slots`` of the flat ``bucket (N,)``, which stays where it is while the plan is used."""
        keeps = self._error_feedback and not codec.lossless
        chunks = [
            Chunk(pieces, self._exchange(codec, pieces, bucket), self.kernels(codec, bucket.dtype))
            for pieces in self._chunked(codec, slots, bucket, keeps)
        ]
        numel = sum(slot.numel for slot in slots)
        return Lane(
            codec,
            slots,
            chunks,
            keeps_residual=keeps,
            raw_bytes=ring_allreduce(numel * bucket.itemsize, self.network.topology).total,
            sent=sum((chunk.exchange.sent for chunk in chunks), Sent()),
        )

    def _chunked(
        self, codec: Codec, slots: Sequence[Slot], bucket: Tensor, keeps: bool
    ) -> Iterator[list[Piece]]:
        rows = self.rows(codec)
        elements = max(CHUNK_ELEMENTS, rows * _LEAST_ROW_ELEMENTS)
        limit = max(1, elements // codec.block)
        if codec.exchange == "allreduce":
            limit = bucket.numel()  # a ring's additions depend on positions: as DDP, one a bucket
        pieces: list[Piece] = []
        columns = 0
        for slot_run in _runs(slots) if codec.lossless else [[slot] for slot in slots]:
            grid = Grid(sum(slot.numel for slot in slot_run), rows, codec.block)
            for span in grid.spans(limit):
                if pieces and (columns + span.columns) * rows > limit:
                    yield pieces
                    pieces, columns = [], 0
                at = slice(columns, columns + span.columns)
                pieces.append(self._piece(slot_run, span, at, bucket, keeps))
                columns += span.columns
        if pieces:
            yield pieces

    def _piece(
        self, run: Sequence[Slot], span: Span, columns: slice, bucket: Tensor, keeps: bool
    ) -> Piece:
        flats = [bucket[run[0].offset : run[0].offset + span.grid.numel]]
        if keeps:
            (slot,) = run
            flats.append(
                self._residuals.get(
                    slot.name,
                    numel=slot.numel,
                    dtype=compute_dtype(bucket.dtype),
                    device=bucket.device,
                )
            )
        if span.direct:
            places = [_view(flat, span) for flat in flats]
            staged: list[tuple[Tensor, Tensor]] = []
        else:
            shape = (span.grid.rows, span.columns, span.grid.block)
            places = [flat.new_zeros(shape) for flat in flats]
            staged = [
                (flat[start : start + length], place[row].view(-1)[:length])
                for flat, place in zip(flats, places, strict=True)
                for row, start, length in span.filled()
            ]
        return Piece(run[0].name, places[0], places[1] if keeps else None, columns, staged)

    def _exchange(self, codec: Codec, pieces: Sequence[Piece], bucket: Tensor) -> Exchange:
        planes = codec.planes(bucket.dtype)
        blocks = pieces[-1].columns.stop
        net = self.network
        if codec.exchange == "allreduce":
            whole = codec.lossless and len(pieces) == 1
            return AllReduce(
                planes,
                blocks,
                group=net.data,
                topology=net.topology,
                device=net.device,
                keep_own=pieces[0].residual is not None,
                in_place=pieces[0].grad if whole else None,
            )
        make = partial(TwoShot, reduce=self.kernels(codec, bucket.dtype).reduce)
        build = Gather if net.world_size == 2 else make
        return build(planes, blocks, group=net.data, topology=net.topology, device=net.device)


def _runs(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Slots that lie one after the other in the bucket, together."""
    runs: list[list[Slot]] = []
    for slot in slots:
        if runs and runs[-1][-1].offset + runs[-1][-1].numel == slot.offset:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def _view(flat: Tensor, span: Span) -> Tensor:
    grid = span.grid
    return flat.as_strided(
        (grid.rows, span.columns, grid.block),
        (grid.blocks_per_row * grid.block, grid.block, 1),
        flat.storage_offset() + span.first * grid.block,
    )


def _columns(payload: Payload, columns: slice) -> Payload:
    return tuple(plane[:, columns] for plane in payload)
