"""What holds on all ranks of a training; every rank asks with its own facts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from rank_loop import meet
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

T = TypeVar("T")


def of_all(value: T) -> list[T]:
    """What every rank gives."""
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and the same bits."""
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"differ: {different}"


@contextmanager
def world_of(size: int) -> Iterator[bool]:
    """The first ``size`` ranks are the world for a while; whether this rank is of it."""
    store, rank = _get_default_store(), dist.get_rank()
    before = {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    everybody, number = dist.get_world_size(), store.add(f"worlds of {rank}", 1)
    dist.barrier()
    dist.destroy_process_group()
    if rank < size:
        os.environ.update(dict.fromkeys(before, str(size)))
        meet(dist.PrefixStore(f"{number} of {size}", store), rank, size)
        yield True
        dist.destroy_process_group()
        os.environ.update(before)
    else:
        yield False
    store = dist.PrefixStore(f"{number} of all", store)
    meet(store, rank, everybody, timeout=timedelta(seconds=100))
