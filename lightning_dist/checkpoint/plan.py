"""Which bytes of a checkpoint a rank copies and writes, and which may be copied later."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lightning_dist.checkpoint.disk.jobs import Piece
from lightning_dist.checkpoint.pickling import Pickled

PICKLE = "data.pkl"
_ALIGNMENT = 64
_SMALL = {"byteorder": sys.byteorder.encode(), "version": b"3\n"}
"""Records that every archive of torch.save has, with their content on this machine."""


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes ``start`` to ``start + nbytes`` of a storage, and where the snapshot keeps them."""

    storage: torch.UntypedStorage
    start: int
    piece: Piece


@dataclass(frozen=True)
class Plan:
    """What one rank copies for one save.

    ``constants`` are ready bytes, ``now`` is copied at the trigger and ``later`` while training
    goes on. ``nbytes`` is what the snapshot takes.
    """

    constants: tuple[tuple[Piece, bytes], ...]
    now: tuple[Run, ...]
    later: tuple[Run, ...]
    nbytes: int
    records: tuple[str, ...]
    """All records of the checkpoint, of all ranks, in the order of the archive."""
    striped: Mapping[str, int]
    """Those that are striped, with their bytes."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """In the order of the archive."""
        found = [piece for piece, _ in self.constants]
        found += [run.piece for run in (*self.now, *self.later)]
        return tuple(sorted(found, key=lambda piece: piece.offset))


Owned = Mapping[int, Tensor]
"""Tensors that nothing but an optimizer step changes, by the address of their storage."""


def owned_by(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, Tensor]:
    """Parameters and states of the optimizers."""
    owned = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owned[parameter.untyped_storage().data_ptr()] = parameter
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    owned[value.untyped_storage().data_ptr()] = value
    owned.pop(0, None)  # of empty tensors
    return owned


@dataclass(frozen=True)
class Striped:
    """A tensor of a checkpoint whose elements lie on different ranks.

    ``whole`` stands for it in the state, on all ranks; its memory is never read. ``own`` are the
    contiguous parts that this rank has, with the element of ``whole`` at which they start. What no
    rank has is zero.
    """

    whole: Tensor
    own: tuple[tuple[int, Tensor], ...]

    def runs(self) -> list[tuple[int, Tensor]]:
        """The parts with the byte at which they start, in order."""
        size = self.whole.element_size()
        return [(start * size, part) for start, part in sorted(self.own, key=lambda own: own[0])]


def plan(
    pickled: Pickled,
    *,
    owned: Owned,
    overlap: bool,
    striped: Mapping[int, Striped] = MappingProxyType({}),
    rank: int = 0,
    ranks: int = 1,
) -> Plan:
    """Divide a checkpoint.

    With several ranks, what the optimizers own is alike on all of them: each takes a run of equal
    length of all that, in the order of the archive. Of what is striped each takes what it has. The
    rest differs from rank to rank (buffers, random states, the pickle itself); there rank 0 speaks
    for all, as in every DDP checkpoint.
    """
    parts = _Parts()
    shared = sum(s.nbytes() for s in pickled.storages if s.data_ptr() in owned)
    low, high = shared * rank // ranks, shared * (rank + 1) // ranks
    passed = 0
    for record, content in _contents(pickled).items():
        address = 0 if isinstance(content, bytes) else content.data_ptr()
        if address in striped:
            for start, part in striped[address].runs():
                parts.copy(record, part.untyped_storage(), *_extent(part), at=start)
        elif address in owned and not isinstance(content, bytes):
            passed, before = passed + content.nbytes(), passed
            start = min(max(low - before, 0), content.nbytes())
            end = min(max(high - before, 0), content.nbytes())
            if start < end:
                parts.copy(record, content, start, end - start, at=start, later=overlap)
        elif rank == 0 and isinstance(content, bytes):
            parts.put(record, content)
        elif rank == 0 and not isinstance(content, bytes):
            parts.copy(record, content, 0, content.nbytes(), at=0)
    return Plan(
        tuple(parts.constants),
        tuple(parts.now),
        tuple(parts.later),
        parts.nbytes,
        tuple(_contents(pickled)),
        {
            f"data/{key}": storage.nbytes()
            for key, storage in enumerate(pickled.storages)
            if storage.data_ptr() in striped
        },
    )


def _contents(pickled: Pickled) -> dict[str, bytes | torch.UntypedStorage]:
    storages = {f"data/{key}": storage for key, storage in enumerate(pickled.storages)}
    return {PICKLE: pickled.data, **_SMALL, **storages}


def _extent(part: Tensor) -> tuple[int, int]:
    """First byte and bytes of a contiguous tensor in its storage."""
    assert part.is_contiguous()
    return int(part.storage_offset()) * part.element_size(), part.nbytes


class _Parts:
    """What a rank takes of a checkpoint, one place in the snapshot after the other."""

    def __init__(self) -> None:
        self.constants: list[tuple[Piece, bytes]] = []
        self.now: list[Run] = []
        self.later: list[Run] = []
        self.nbytes = 0

    def put(self, record: str, content: bytes) -> None:
        self.constants.append((self._piece(record, len(content), 0), content))

    def copy(
        self,
        record: str,
        storage: torch.UntypedStorage,
        start: int,
        nbytes: int,
        *,
        at: int,
        later: bool = False,
    ) -> None:
        run = Run(storage, start, self._piece(record, nbytes, at))
        (self.later if later else self.now).append(run)

    def _piece(self, record: str, nbytes: int, start: int) -> Piece:
        piece = Piece(record, nbytes, self.nbytes, start)
        self.nbytes += nbytes + -nbytes % _ALIGNMENT
        return piece


def shape_of(
    pickled: Pickled, owned: Owned, striped: Mapping[int, Striped] = MappingProxyType({})
) -> int:
    """A number that is equal on all ranks if they would divide the checkpoint alike."""
    storages = [(key, s.data_ptr(), s.nbytes()) for key, s in enumerate(pickled.storages)]
    shared = [(key, nbytes) for key, address, nbytes in storages if address in owned]
    apart = [(key, nbytes) for key, address, nbytes in storages if address in striped]
    return zlib.crc32(repr((shared, apart)).encode())
