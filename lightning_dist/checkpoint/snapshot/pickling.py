"""The pickle of a checkpoint in torch.save's format, with its storages left out and numbered.

``torch.save`` pickles and writes in one go; here the bytes of the storages come later, from a
snapshot. Two names are private to :mod:`torch.serialization`: the location of a storage and the
names of its types; the test compares the pickle with torch's own, byte for byte.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch.serialization import DEFAULT_PROTOCOL, location_tag, normalize_storage_type


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
        storage, dtype, kind, numel = _typed(obj)
        address = 0 if storage.device.type == "meta" else storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise ValueError(
                "A checkpoint cannot hold two tensors that view the same memory as different "
                "dtypes; clone one of them in on_save_checkpoint"
            )
        key = self._keys.setdefault(storage._cdata, str(len(self._keys)))
        self.storages[storage._cdata] = storage
        return "storage", kind, key, location_tag(storage), numel


def _typed(storage: Any) -> tuple[torch.UntypedStorage, torch.dtype, Any, int]:
    """The memory of a storage; dtype, legacy class and number of its elements."""
    if isinstance(storage, torch.storage.TypedStorage):
        kind = getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call]
        numel = storage._size()  # type: ignore[no-untyped-call]
        return storage._untyped_storage, storage.dtype, kind, numel
    kind = normalize_storage_type(type(storage))  # type: ignore[no-untyped-call]
    return storage, torch.uint8, kind, storage.nbytes()


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
