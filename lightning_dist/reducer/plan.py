"""What happens to one bucket, worked out once and reused until DDP changes its layout.

bucket -> lanes (one codec each) -> chunks (one exchange each) -> pieces (one kernel call each).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec
from lightning_dist.exchange.rounds import AllReduce, Exchange, Gather, TwoShot
from lightning_dist.exchange.traffic import Sent, ring_allreduce
from lightning_dist.reducer.chunk import Chunk, Lane, Piece
from lightning_dist.reducer.fusing import Variant, fused_passes
from lightning_dist.reducer.geometry import Grid, Span
from lightning_dist.reducer.kernels import Factors, Kernels, compute_dtype
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.policy import Slot
from lightning_dist.reducer.residuals import Residuals

CHUNK_ELEMENTS = 1 << 18  # 1 MB of float32 gradient; measured best of 256 Ki and 1 Mi
_LEAST_ROW_ELEMENTS = 1 << 15  # many ranks: larger chunks rather than tiny messages


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
        # Blocks and residuals belong to one parameter; without them neighbours are one piece.
        separate = keeps or codec.block > 1
        for slot_run in [[slot] for slot in slots] if separate else _runs(slots):
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
