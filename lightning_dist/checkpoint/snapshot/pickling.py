"""The pickle of a checkpoint in torch.save's format, with its storages left out and numbered.

``torch.save`` pickles and writes in one go; here the bytes of the storages come later, from a
snapshot. The test compares the pickle with torch's own, byte for byte.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch.serialization import DEFAULT_PROTOCOL

from lightning_dist.checkpoint.private import describe_storage, identity_of, location_of


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
