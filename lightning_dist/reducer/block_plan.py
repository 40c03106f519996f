"""How the parameters of a block codec are cut into chunks and pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Payload
from lightning_dist.exchange.rounds import AllReduce, Exchange, Gather, TwoShot
from lightning_dist.reducer.block_chunk import BlockChunk
from lightning_dist.reducer.chunk_sizes import chunk_elements
from lightning_dist.reducer.geometry import Grid, Span
from lightning_dist.reducer.kernels import Kernels, compute_dtype
from lightning_dist.reducer.keys import ChunkKeys, Place
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.pieces import Piece, piece_of
from lightning_dist.reducer.policy import Slot, neighbours
from lightning_dist.reducer.state import ReducerState


@dataclass(frozen=True)
class BlockPlan:
    """Chunks of one codec for gradients of one dtype."""

    codec: BlockCodec
    kernels: Kernels
    network: Network
    state: ReducerState

    @property
    def rows(self) -> int:
        """One row per rank where each rank reduces a shard, otherwise whole payloads travel."""
        world = self.network.world_size
        return world if self.codec.exchange == "two_shot" and world > 2 else 1

    @property
    def received(self) -> int:
        """Payloads that a rank decodes and adds."""
        whole = self.rows == 1 and self.codec.exchange != "allreduce"
        return self.network.world_size if whole else 1

    def chunks(self, slots: Sequence[Slot], bucket: Tensor) -> list[BlockChunk]:
        return [self._chunk(pieces, bucket.dtype) for pieces in self._pieces(slots, bucket)]

    def _pieces(self, slots: Sequence[Slot], bucket: Tensor) -> Iterator[list[Piece]]:
        rows, codec = self.rows, self.codec
        limit = max(1, chunk_elements(rows) // codec.block)
        if codec.exchange == "allreduce":
            limit = bucket.numel()  # a ring's additions depend on positions: as DDP, one a bucket
        pieces: list[Piece] = []
        columns = 0
        # Blocks and state belong to one parameter; without them neighbours are one piece.
        separate = codec.block > 1 or bool(self.kernels.memory.kinds)
        for run in [[slot] for slot in slots] if separate else neighbours(slots):
            grid = Grid(sum(slot.numel for slot in run), rows, codec.block)
            for span in grid.spans(limit):
                if pieces and (columns + span.columns) * rows > limit:
                    yield pieces
                    pieces, columns = [], 0
                at = slice(columns, columns + span.columns)
                pieces.append(self._piece(run, span, at, bucket))
                columns += span.columns
        if pieces:
            yield pieces

    def _piece(self, run: Sequence[Slot], span: Span, columns: slice, bucket: Tensor) -> Piece:
        flats = [bucket[run[0].offset : run[0].offset + span.grid.numel]]
        flats += [
            self.state.per_rank(
                kind, run[0], dtype=compute_dtype(bucket.dtype), device=bucket.device
            )
            for kind in self.kernels.memory.kinds
        ]
        numbers = span.numbers(bucket.device) if self.codec.stochastic else bucket.new_empty(0)
        name = f"{run[0].name} from {run[0].start}" if run[0].start else run[0].name
        return piece_of(name, flats, span, columns=columns, numbers=numbers)

    def _chunk(self, pieces: Sequence[Piece], dtype: torch.dtype) -> BlockChunk:
        rank = self.network.rank
        keys = None
        if self.codec.stochastic:
            places = [Place(piece.name, piece.columns, piece.numbers) for piece in pieces]
            keys = ChunkKeys(self.codec, places, rank=rank)
        exchange = self._exchange(pieces, dtype, keys)
        return BlockChunk(pieces, exchange, self.kernels, keys=keys, rank=rank)

    def _exchange(
        self, pieces: Sequence[Piece], dtype: torch.dtype, keys: ChunkKeys | None
    ) -> Exchange:
        codec, net = self.codec, self.network
        planes, blocks = codec.planes(dtype), pieces[-1].columns.stop
        if codec.exchange == "allreduce":
            whole = codec.lossless and len(pieces) == 1
            return AllReduce(
                planes,
                blocks,
                channel=net.data,
                topology=net.topology,
                device=net.device,
                keep_own=bool(pieces[0].state),
                in_place=pieces[0].grad if whole else None,
            )

        def reduce(shards: Payload, mean: Payload) -> None:
            self.kernels.reduce(shards, None if keys is None else keys.reduce, mean)

        build = Gather if self.rows == 1 else partial(TwoShot, reduce=reduce)
        return build(planes, blocks, channel=net.data, topology=net.topology, device=net.device)
