"""Private names of torch that checkpoints need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_dist.base.features import CHECKPOINTS, SHARDED_CHECKPOINTS

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor


# Autograd counts changes in place, and says so nowhere else.
def version_of(tensor: Tensor) -> int:
    """Number of changes in place of a tensor and its views."""
    CHECKPOINTS.require()
    return tensor._version


# torch.save leaves no way to write the bytes of storages later than their pickle.
def describe_storage(storage: Any) -> tuple[torch.UntypedStorage, torch.dtype, Any, int]:
    """Memory of a storage; dtype, legacy class and number of its elements, as torch.save has it."""
    CHECKPOINTS.require()
    from torch.serialization import normalize_storage_type

    if isinstance(storage, torch.storage.TypedStorage):
        kind = getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call]
        numel = storage._size()  # type: ignore[no-untyped-call]
        return storage._untyped_storage, storage.dtype, kind, numel
    kind = normalize_storage_type(type(storage))  # type: ignore[no-untyped-call]
    return storage, torch.uint8, kind, storage.nbytes()


def location_of(storage: Any) -> str:
    """Name of the device of a storage, as in a checkpoint."""
    CHECKPOINTS.require()
    from torch.serialization import location_tag

    return str(location_tag(storage))


def identity_of(storage: torch.UntypedStorage) -> int:
    """A number that storages have in common if they are one."""
    identity: int = storage._cdata
    return identity


# There is no way to ask a module what it does before it loads.
def loads_by_itself(module: nn.Module) -> bool:
    """Whether a module has a say in what it loads: a hook, or a method of its own."""
    CHECKPOINTS.require()
    methods = (getattr(type(module), name) for name in ("load_state_dict", "_load_from_state_dict"))
    of_torch = (str(getattr(method, "__module__", "")).partition(".")[0] for method in methods)
    return bool(module._load_state_dict_pre_hooks) or any(
        package != "torch" for package in of_torch
    )


# What torch's own checkpoints ask: offsets follow from the order of shards as well.
def chunk_of(tensor: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """First index and size of this rank's part of a sharded tensor, in every dimension."""
    SHARDED_CHECKPOINTS.require()
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return chunk.offsets, chunk.sizes


# Documented for tensors loaded under FakeTensorMode; there is no other way to read a part of one.
def offset_in_file(tensor: Tensor) -> int:
    """Offset in its file of the storage of a tensor that was loaded onto ``"meta"``."""
    SHARDED_CHECKPOINTS.require()
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


def knows_offset(tensor: Tensor) -> bool:
    """Whether a tensor that was loaded onto ``"meta"`` has that offset; torch 2.9 keeps none."""
    SHARDED_CHECKPOINTS.require()
    return tensor.untyped_storage()._checkpoint_offset is not None
