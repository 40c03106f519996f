"""The two collectives that a sharded model consists of, with flat tensors as rows of a payload.

What FSDP gathers is a row of every rank: its shards of some parameters, one after the other. What
it reduces and scatters is a row for every rank. Here both travel in blocks of a codec, those of
each parameter by themselves, and what a policy leaves uncompressed as it is. Nothing is kept but,
if it is wished, the error of gradients, in 8 bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_dist.base.private import copy_all
from lightning_dist.codecs.base import BlockCodec
from lightning_dist.codecs.memory import Memory, NoMemory, RoundedError, State
from lightning_dist.codecs.noise import block_keys
from lightning_dist.exchange.rounds import row_bytes, views
from lightning_dist.kernels.inductor import Variant, fused_passes
from lightning_dist.kernels.passes import Factors, Kernels
from lightning_dist.ranks import Topology, traffic
from lightning_dist.ranks.channel import Channel

Cut = Mapping[BlockCodec, Sequence[tuple[int, int]]]
"""``(offset, elements)`` of what each codec has of a row."""


@dataclass(frozen=True)
class _Part:
    """One codec's part of every row: ``blocks`` of it, behind ``before`` bytes of the payload."""

    kernels: Kernels
    slices: Sequence[tuple[int, int]]
    blocks: int
    before: int

    def loaded(self, rows: Tensor) -> Tensor:
        """Slices of ``rows (R, N)`` as ``(R, blocks, block)``, zeros behind the last of each."""
        staged = self.empty(rows).zero_()
        copy_all(self._places(staged), self._flats(rows))
        return staged

    def empty(self, rows: Tensor) -> Tensor:
        return rows.new_empty(len(rows), self.blocks, self.kernels.codec.block)

    def store(self, staged: Tensor, rows: Tensor) -> None:
        """The way back."""
        copy_all(self._flats(rows), self._places(staged))

    def _flats(self, rows: Tensor) -> list[Tensor]:
        return [rows[:, start : start + numel] for start, numel in self.slices]

    def _places(self, staged: Tensor) -> list[Tensor]:
        block = staged.shape[2]
        sizes = [-(-numel // block) * block for _, numel in self.slices]
        parts = staged.view(len(staged), -1).split_with_sizes(sizes, dim=1)
        return [part[:, :n] for part, (_, n) in zip(parts, self.slices, strict=True)]


class RowLayout:
    """Byte layout of rows of ``numel`` elements of ``dtype``.

    Args:
        weight: of every payload in a sum of several.
        ranks: rows of a tensor that is encoded or decoded as a whole.
        memory: of what codecs lose that do lose something.
    """

    def __init__(
        self,
        cut: Cut,
        *,
        numel: int,
        dtype: torch.dtype,
        ranks: int,
        weight: float = 1.0,
        memory: RoundedError | None = None,
    ) -> None:
        self.numel, self.dtype, self.ranks = numel, dtype, ranks
        self.nbytes = 0
        """Bytes of the payload of a row."""
        self._parts: list[_Part] = []
        self.codec = "+".join(dict.fromkeys(codec.name for codec in cut))
        """Names of all codecs."""
        self._memory = memory
        for codec, slices in cut.items():
            kept: Memory = NoMemory() if memory is None or codec.lossless else memory
            factors = Factors(mean=weight)
            kernels = Kernels(codec, memory=kept, factors=factors, world_size=ranks)
            blocks = sum(-(-numel // codec.block) for _, numel in slices)
            self._parts.append(_Part(kernels, slices, blocks, self.nbytes))
            self.nbytes += row_bytes(codec.planes(dtype), blocks)

    def errors(self, device: torch.device) -> list[tuple[Tensor, ...]]:
        """Memory for what is kept of every part."""
        memory = self._memory
        return [
            memory.empty(self.ranks, part.blocks, part.kernels.codec.block, device)
            if memory is not None and part.kernels.memory.kinds
            else ()
            for part in self._parts
        ]

    def errors_of_slices(
        self, errors: Sequence[tuple[Tensor, ...]]
    ) -> dict[int, tuple[Tensor, ...]]:
        """Views ``(ranks, blocks, ...)`` of ``errors``, by the offset of each slice in a row."""
        by_offset: dict[int, tuple[Tensor, ...]] = {}
        for part, state in zip(self._parts, errors, strict=True):
            sizes = [-(-numel // part.kernels.codec.block) for _, numel in part.slices]
            of_slices = zip(*(held.split_with_sizes(sizes, dim=1) for held in state), strict=True)
            offsets = [offset for offset, _ in part.slices]
            by_offset |= dict(zip(offsets, of_slices, strict=False))  # none of a lossless codec
        return by_offset

    def encode(
        self,
        rows: Tensor,
        payload: Tensor,
        *,
        salt: int = 0,
        errors: Sequence[tuple[Tensor, ...]] = (),
    ) -> None:
        """``rows (R, numel)`` -> ``payload (R, nbytes)``.

        Args:
            errors: changed where there are any.
            salt: of the random numbers of stochastic codecs.
        """
        unscaled = torch.ones((), dtype=torch.float32, device=rows.device)
        for number, part in enumerate(self._parts):
            state = errors[number] if errors else ()
            encode = part.kernels.encode_and_commit if state else part.kernels.encode
            keys = _keys(part, len(rows), salt, rows.device)
            encode(part.loaded(rows), state, unscaled, keys, self._planes(part, payload))

    def decode(self, payloads: Sequence[Tensor], rows: Tensor) -> None:
        """``rows (R, numel)`` <- the weighted sum of ``payloads (R, nbytes)``, in their order."""
        unscaled = torch.ones((), dtype=torch.float32, device=rows.device)
        for part in self._parts:
            staged = part.empty(rows)
            received = tuple(self._planes(part, payload) for payload in payloads)
            part.kernels.decode_and_commit(staged, (), unscaled, None, received[0], received)
            part.store(staged, rows)

    def fuse(self, device: torch.device, *, encoded: int, decoded: int, received: int) -> None:
        """Compile the kernels on a CPU: so many rows are encoded, decoded, and received of each."""
        for kernels in (part.kernels for part in self._parts):
            if not kernels.codec.fusable or kernels.codec.lossless:
                continue
            sent = Variant(kernels.passes, self.dtype, encoded, 1, device, True, only="encode")
            mean = Variant(
                kernels.passes, self.dtype, decoded, received, device, True, only="decode"
            )
            kernels.use({**fused_passes(sent), **fused_passes(mean)})

    def _planes(self, part: _Part, payload: Tensor) -> tuple[Tensor, ...]:
        planes = part.kernels.codec.planes(self.dtype)
        end = part.before + row_bytes(planes, part.blocks)
        return views(payload[:, part.before : end], planes, part.blocks)


def _keys(part: _Part, rows: int, salt: int, device: torch.device) -> Tensor | None:
    if not part.kernels.codec.stochastic:
        return None
    numbers = torch.arange(rows * part.blocks, dtype=torch.int32, device=device)
    return block_keys(numbers.view(rows, part.blocks, 1), salt)


def joined_errors(errors: State, shape: Sequence[int]) -> Tensor:
    """``errors (ranks, blocks, ...)`` of a parameter of ``shape``, decoded and flat."""
    decoded = RoundedError().value(errors).flatten(1)
    numel = -(-shape[0] // len(decoded)) * prod(shape[1:])
    if not 0 <= decoded.shape[1] - numel < errors[1].shape[2]:
        raise ValueError(
            f"A parameter of {tuple(shape)} has {numel} elements on each of {len(decoded)} ranks, "
            f"and the saved error {decoded.shape[1]}; this state belongs to another model"
        )
    return decoded[:, :numel].reshape(-1)[: prod(shape)]


def cut_errors(whole: Tensor, shape: Sequence[int], like: State) -> Tensor:
    """Inverse of :func:`joined_errors`, not yet rounded: the ranks and blocks of ``like``."""
    ranks, blocks, block = like[1].shape
    numel = -(-shape[0] // ranks) * prod(shape[1:])
    rows = pad(whole, (0, ranks * numel - len(whole))).view(ranks, numel)
    return pad(rows, (0, blocks * block - numel)).view(ranks, blocks, block)


class RowGather:
    """An all-gather of a row of every rank, quantised. All ranks get the same bits.

    This rank too gets what the others get of its row.
    """

    def __init__(self, rows: RowLayout, topology: Topology) -> None:
        self.rows = rows
        self.sent = traffic.ring_all_gather(rows.nbytes, topology)
        self.raw = traffic.ring_all_gather(rows.numel * rows.dtype.itemsize, topology)

    def __call__(self, output: Tensor, own: Tensor, channel: Channel) -> None:
        """``own (numel,)`` of every rank, maybe a part of it -> ``output (ranks * numel,)``."""
        rows = self.rows
        received = torch.zeros(rows.ranks, rows.nbytes, dtype=torch.uint8, device=own.device)
        mine = received[channel.group.rank()]
        rows.encode(own.view(1, -1), mine.unsqueeze(0))
        channel.all_gather(received.view(-1), mine).wait()
        rows.decode([received], output.view(rows.ranks, -1))

    def fuse(self, device: torch.device) -> None:
        """Compile the kernels on a CPU."""
        self.rows.fuse(device, encoded=1, decoded=self.rows.ranks, received=1)


class RowReduceScatter:
    """A mean of rows, each on the rank that it belongs to, quantised once.

    An all_to_all brings every rank what all say of its row; it adds in rank order, in float32.

    Args:
        name: of what is reduced, for random numbers that nothing else draws.
    """

    def __init__(
        self, rows: RowLayout, topology: Topology, *, name: str, device: torch.device
    ) -> None:
        self.rows, self.step = rows, 0
        self._name = name
        self.errors = rows.errors(device)
        self.sent = traffic.all_to_all(rows.ranks * rows.nbytes, topology)
        self.raw = traffic.all_to_all(rows.ranks * rows.numel * rows.dtype.itemsize, topology)

    def __call__(self, output: Tensor, given: Tensor, channel: Channel) -> None:
        """``given (ranks * numel,)`` of every rank -> ``output (numel,)``, the mean of this row."""
        rows = self.rows
        payload = torch.zeros(rows.ranks, rows.nbytes, dtype=torch.uint8, device=given.device)
        received = torch.empty_like(payload)
        salt = zlib.crc32(f"{self._name} {self.step} {channel.group.rank()}".encode())
        rows.encode(given.view(rows.ranks, -1), payload, salt=salt, errors=self.errors)
        channel.all_to_all(received.view(-1), payload.view(-1)).wait()
        rows.decode([row.unsqueeze(0) for row in received], output.view(1, -1))
        self.step += 1

    def fuse(self, device: torch.device) -> None:
        """Compile the kernels on a CPU."""
        self.rows.fuse(device, encoded=self.rows.ranks, decoded=1, received=self.rows.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept between steps."""
        return sum(held.nbytes for state in self.errors for held in state)
