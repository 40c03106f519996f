"""Which bytes of a checkpoint a rank copies and writes, and which may be copied later."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """In the order of the archive."""
        order = {record: index for index, record in enumerate(self.records)}
        found = [piece for piece, _ in self.constants]
        found += [run.piece for run in (*self.now, *self.later)]
        return tuple(sorted(found, key=lambda piece: order[piece.record]))


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


def plan(pickled: Pickled, *, owned: Owned, overlap: bool, rank: int = 0, ranks: int = 1) -> Plan:
    """Divide a checkpoint.

    With several ranks, what the optimizers own is alike on all of them: each takes a run of equal
    length of all that, in the order of the archive. The rest differs from rank to rank (buffers,
    random states, the pickle itself); there rank 0 speaks for all, as in every DDP checkpoint.
    """
    contents: dict[str, bytes | torch.UntypedStorage] = {PICKLE: pickled.data, **_SMALL}
    contents |= {f"data/{key}": storage for key, storage in enumerate(pickled.storages)}
    constants: list[tuple[Piece, bytes]] = []
    now: list[Run] = []
    later: list[Run] = []
    shared = sum(s.nbytes() for s in pickled.storages if s.data_ptr() in owned)
    low, high = shared * rank // ranks, shared * (rank + 1) // ranks
    offset = passed = 0
    for record, content in contents.items():
        start, nbytes = 0, len(content) if isinstance(content, bytes) else content.nbytes()
        is_shared = not isinstance(content, bytes) and content.data_ptr() in owned
        if is_shared:
            passed, before = passed + nbytes, passed
            start = min(max(low - before, 0), nbytes)
            nbytes = min(max(high - before, 0), nbytes) - start
        if rank and not is_shared:
            continue
        if is_shared and nbytes == 0:
            continue
        piece = Piece(record, nbytes, offset)
        offset += nbytes + -nbytes % _ALIGNMENT
        if isinstance(content, bytes):
            constants.append((piece, content))
        else:
            (later if is_shared and overlap else now).append(Run(content, start, piece))
    return Plan(tuple(constants), tuple(now), tuple(later), offset, tuple(contents))


def shape_of(pickled: Pickled, owned: Owned) -> int:
    """A number that is equal on all ranks if they would divide the checkpoint alike."""
    storages = enumerate(pickled.storages)
    shared = [(key, s.nbytes()) for key, s in storages if s.data_ptr() in owned]
    return zlib.crc32(repr(shared).encode())
