"""Plan of a snapshot: which bytes of a state go where, and when they are copied.

The pickle is that of torch.save's format, with its storages left out and numbered. ``torch.save``
pickles and writes in one go; here the bytes of the storages come later, from a snapshot. The test
compares the pickle with torch's own, byte for byte.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.serialization import DEFAULT_PROTOCOL

from lightning_dist.checkpoint.disk.jobs import RecordRange
from lightning_dist.checkpoint.private import describe_storage, identity_of, location_of
from lightning_dist.ranks.facts import Spread


@dataclass(frozen=True)
class Pickled:
    """The record ``data.pkl`` and the contents of ``data/0``, ``data/1``, ..."""

    data: bytes
    storages: tuple[torch.UntypedStorage, ...]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=DEFAULT_PROTOCOL)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._keys: dict[int, str] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not torch.is_storage(obj):
            return None
        storage, dtype, kind, numel = describe_storage(obj)
        address = 0 if storage.device.type == "meta" else storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise ValueError(
                "A checkpoint cannot hold two tensors that view the same memory as different "
                "dtypes; clone one of them in on_save_checkpoint"
            )
        identity = identity_of(storage)
        key = self._keys.setdefault(identity, str(len(self._keys)))
        self.storages[identity] = storage
        return "storage", kind, key, location_of(storage), numel


def pickled(state: Any) -> Pickled:
    """Pickle ``state`` as ``torch.save`` does.

    Tensors that share memory share a storage, so tied weights stay tied and are stored once.

    Raises:
        ValueError: two tensors view the same memory as different dtypes.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(state)
    return Pickled(file.getvalue(), tuple(pickler.storages.values()))


PICKLE = "data.pkl"
_ALIGNMENT = 64
_SMALL = {"byteorder": sys.byteorder.encode(), "version": b"3\n"}
"""Records that every archive of torch.save has, with their content on this machine."""


@dataclass(frozen=True, slots=True)
class StorageRange:
    """Bytes ``start`` to ``start + nbytes`` of a storage, and where the snapshot keeps them."""

    storage: torch.UntypedStorage
    start: int
    target: RecordRange


@dataclass(frozen=True)
class SnapshotPlan:
    """Bytes that one rank copies for one save.

    ``constants`` are ready bytes, ``now`` is copied at the trigger and ``later`` while training
    goes on. ``nbytes`` is what the snapshot takes.
    """

    constants: tuple[tuple[RecordRange, bytes], ...]
    now: tuple[StorageRange, ...]
    later: tuple[StorageRange, ...]
    nbytes: int
    records: tuple[str, ...]
    """All records of the checkpoint, of all ranks, in the order of the archive."""
    spread: Mapping[str, int]
    """Those that are spread and may have gaps, with their bytes."""
    complete: Mapping[str, int]
    """Those that are spread and may have none."""

    @property
    def ranges(self) -> tuple[RecordRange, ...]:
        """In the order of the archive."""
        found = [record_range for record_range, _ in self.constants]
        found += [storage_range.target for storage_range in (*self.now, *self.later)]
        return tuple(sorted(found, key=lambda record_range: record_range.offset))


Owned = Mapping[int, Tensor]
"""Tensors that nothing but an optimizer step changes, by the address of their storage."""


def owned_by(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, Tensor]:
    """Parameters and states of the optimizers."""
    owned = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owned[local_of(parameter).untyped_storage().data_ptr()] = parameter
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    owned[local_of(value).untyped_storage().data_ptr()] = value
    owned.pop(0, None)  # of empty tensors
    return owned


@torch.no_grad()
def local_of(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` on this rank: all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plan(
    pickled: Pickled,
    *,
    owned: Owned,
    overlap: bool,
    spreads: Mapping[int, Spread] = MappingProxyType({}),
    rank: int = 0,
    ranks: int = 1,
) -> SnapshotPlan:
    """Divide a checkpoint.

    With several ranks, what the optimizers own is alike on all of them: each takes a range of equal
    length of all that, in the order of the archive. Of what is spread each takes what it has. The
    rest differs from rank to rank (buffers, random states, the pickle itself); there rank 0 speaks
    for all, as in every DDP checkpoint.
    """
    constants: list[tuple[RecordRange, bytes]] = []
    now: list[StorageRange] = []
    later: list[StorageRange] = []
    used = 0

    def place(record: str, nbytes: int, start: int = 0) -> RecordRange:
        """The next bytes of the snapshot, for those of ``record`` from ``start``."""
        nonlocal used
        record_range = RecordRange(record, nbytes, used, start)
        used += nbytes + -nbytes % _ALIGNMENT
        return record_range

    shared = sum(s.nbytes() for s in pickled.storages if s.data_ptr() in owned)
    low, high = shared * rank // ranks, shared * (rank + 1) // ranks
    passed = 0
    for record, content in _contents(pickled).items():
        if isinstance(content, bytes):
            if rank == 0:
                constants.append((place(record, len(content)), content))
            continue
        address, nbytes = content.data_ptr(), content.nbytes()
        if address in spreads:
            for start, part in spreads[address].runs():
                assert part.is_contiguous()
                first = int(part.storage_offset()) * part.element_size()
                copied = StorageRange(
                    part.untyped_storage(), first, place(record, part.nbytes, start)
                )
                is_owned = copied.storage.data_ptr() in owned
                (later if overlap and is_owned else now).append(copied)
        elif address in owned:
            start, end = (min(max(bound - passed, 0), nbytes) for bound in (low, high))
            passed += nbytes
            if start < end:
                copied = StorageRange(content, start, place(record, end - start, start))
                (later if overlap else now).append(copied)
        elif rank == 0:
            now.append(StorageRange(content, 0, place(record, nbytes)))
    sizes: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for key, storage in enumerate(pickled.storages):
        if (found := spreads.get(storage.data_ptr())) is not None:
            sizes[found.complete][f"data/{key}"] = storage.nbytes()
    return SnapshotPlan(
        tuple(constants),
        tuple(now),
        tuple(later),
        used,
        tuple(_contents(pickled)),
        spread=sizes[False],
        complete=sizes[True],
    )


def _contents(pickled: Pickled) -> dict[str, bytes | torch.UntypedStorage]:
    storages = {f"data/{key}": storage for key, storage in enumerate(pickled.storages)}
    return {PICKLE: pickled.data, **_SMALL, **storages}


def shape_of(
    pickled: Pickled, owned: Owned, spreads: Mapping[int, Spread] = MappingProxyType({})
) -> int:
    """A number that is equal on all ranks if they would divide the checkpoint alike."""
    storages = [(key, s.data_ptr(), s.nbytes()) for key, s in enumerate(pickled.storages)]
    shared = [(key, nbytes) for key, address, nbytes in storages if address in owned]
    apart = [(key, nbytes) for key, address, nbytes in storages if address in spreads]
    return zlib.crc32(repr((shared, apart)).encode())
