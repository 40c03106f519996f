"""Sharded tensors (``DTensor``): one whole tensor of the checkpoint, written and read in parts.

The whole one is what a single process would have saved, so that any mesh loads it, and a plain
module. No rank ever holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dist.base.private import tensors_in
from lightning_dist.checkpoint.private import chunk_of, knows_offset, offset_in_file
from lightning_dist.checkpoint.reading import opened, restricted_load
from lightning_dist.checkpoint.snapshot.plan import local_of
from lightning_dist.ranks.facts import Spread


def without_shards(state: Any, mesh: DeviceMesh) -> tuple[Any, list[Spread]]:
    """``state`` with a whole tensor in the place of each sharded one, and what this rank has of it.

    Ranks that hold the same elements, as replicas do, write an equal share of them each.

    Args:
        state: of dicts, lists and tuples. Parameters in it are detached.
        mesh: of all ranks that save; those of the tensors are slices of it.
    """
    found: dict[int, Spread] = {}  # by id: tied weights stay one tensor

    def replaced(value: Any) -> Any:
        if isinstance(value, DTensor):
            if id(value) not in found:
                whole = torch.empty(value.shape, dtype=value.dtype)
                share = _share(value, mesh)
                found[id(value)] = Spread(whole, tuple(_runs(value, *share)), complete=True)
            return found[id(value)].whole
        if isinstance(value, nn.Parameter):
            return value.detach()
        return _mapped(replaced, value)

    return replaced(state), list(found.values())


class LazyState:
    """The state of a checkpoint of which tensors are read when they are asked for.

    Args:
        file: open, of torch.save's format.
        state: loaded from it; on ``"meta"`` are those tensors that were not read.
    """

    def __init__(self, file: Any, state: Any) -> None:
        self._file, self.state = file, state
        self._storages: dict[int, torch.UntypedStorage] = {}  # shared ones stay shared

    def whole(self, value: Any) -> Any:
        """``value`` with all tensors in it read: those of its dicts, lists and tuples."""
        if not isinstance(value, Tensor) or not value.is_meta:
            return value if isinstance(value, Tensor) else _mapped(self.whole, value)
        offset = offset_in_file(value)
        if offset not in self._storages:
            content = self._read(offset, value.untyped_storage().nbytes())
            self._storages[offset] = content.untyped_storage()
        empty = torch.empty(0, dtype=value.dtype)
        place = value.storage_offset(), value.shape, value.stride()
        return empty.set_(self._storages[offset], *place)

    def part(self, value: Tensor, like: DTensor) -> DTensor:
        """This rank's part of ``value``, sharded as ``like`` is."""
        found: Any = torch.empty_like(like)
        value = value if value.is_contiguous() else self.whole(value)
        for start, part in _runs(found):
            part.copy_(self.run(value, start, part.numel()))
        assert isinstance(found, DTensor)
        return found

    def run(self, value: Tensor, start: int, numel: int) -> Tensor:
        """Elements of ``value`` from ``start``, flat. Of a contiguous one no more is read."""
        if not value.is_meta or not value.is_contiguous():
            return self.whole(value).reshape(-1)[start : start + numel]  # type: ignore[no-any-return]
        size = value.element_size()
        begin = offset_in_file(value) + (int(value.storage_offset()) + start) * size
        return self._read(begin, numel * size).view(value.dtype)

    def _read(self, offset: int, nbytes: int) -> Tensor:
        content = bytearray(nbytes)
        self._file.seek(offset)
        self._file.readinto(content)
        return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()


@contextmanager
def load_lazily(path: str, *, weights_only: bool | None = None) -> Iterator[LazyState]:
    """The state at ``path``, of which each rank reads what it needs.

    It is to be verified before. With ``weights_only=False``, where tensors may be anywhere, all of
    it is read at once, as before torch 2.11, which does not tell where they are in the file.

    Raises:
        FileNotFoundError: nothing is there.
        CheckpointError: a newer version of this package wrote it, or it holds no state.
        ValueError: ``weights_only`` does not let it be read.
    """
    with opened(path, check=False) as file:
        load = partial(restricted_load, file, path=path, weights_only=weights_only)
        state = load(map_location="cpu" if weights_only is False else "meta")
        if not all(knows_offset(tensor) for tensor in tensors_in(state) if tensor.is_meta):
            file.seek(0)
            state = load(map_location="cpu")
        yield LazyState(file, state)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to what is in it, if it is a dict, list or tuple."""
    if isinstance(value, dict):
        found = copy(value)  # of its own kind
        found.update({key: function(each) for key, each in value.items()})
        return found
    if isinstance(value, list | tuple):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _share(tensor: DTensor, mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's number among those that hold the same elements of ``tensor``, and how many."""
    names, number, count = tensor.device_mesh.mesh_dim_names, 0, 1
    assert names is not None
    placed = zip(names, tensor.placements, strict=True)
    sharded = {name for name, placement in placed if not placement.is_replicate()}
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    assert mesh.mesh_dim_names is not None
    for name, size, own in zip(mesh.mesh_dim_names, mesh.shape, coordinate, strict=True):
        if name not in sharded:
            number, count = number * size + own, count * size
    return number, count


def _runs(tensor: DTensor, share: int = 0, of: int = 1) -> Iterator[tuple[int, Tensor]]:
    """The ``share``-th of ``of`` equal parts of what this rank has, as contiguous runs.

    Each is the element of the whole tensor at which it starts, and a flat view of local memory.
    """
    offsets, sizes = chunk_of(tensor)
    shape, local = tensor.shape, local_of(tensor).detach().reshape(-1)
    cut = [dimension for dimension, size in enumerate(sizes) if size != shape[dimension]]
    inner = cut[-1] if cut else 0  # inside of it rows are whole
    strides = [prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    length = prod(sizes[inner:])
    low, high = local.numel() * share // of, local.numel() * (share + 1) // of
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for number, rows in enumerate(product(*map(range, sizes[:inner]))):
        begin, end = max(low, number * length), min(high, (number + 1) * length)
        if begin < end:
            row = first + sum(row * stride for row, stride in zip(rows, strides, strict=False))
            yield row + begin - number * length, local[begin:end]
