"""What holds on all ranks of a training; every rank asks with its own facts (`fitting.fit`)."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from rank_loop import meet
from scenarios.fitting import compressed, fit, lossless, plain
from scenarios.world import Facts
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

T = TypeVar("T")


def of_all(value: T) -> list[T]:
    """What every rank gives."""
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def mean_of_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean of all ranks by name, such as what their residuals owe to the model."""
    ranks = of_all(dict(tensors))
    return {name: torch.stack([each[name] for each in ranks]).mean(0) for name in ranks[0]}


def mean_loss(facts: Facts, batches: slice) -> float:
    """Of all ranks and these batches."""
    losses = [loss for own in of_all(facts["losses"]) for loss in own[batches]]
    return sum(losses) / len(losses)


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and the same bits."""
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"differ: {different}"


def require_replicas(facts: Facts) -> None:
    """Parameters were bit-identical on all ranks after every batch, and they moved."""
    digests = facts["digests"]
    assert all(each == digests for each in of_all(digests))
    assert len(set(digests)) > 1
    for each in of_all(facts["parameters"]):
        require_equal(each, facts["parameters"])
    assert all(value.isfinite().all() for value in facts["parameters"].values())


def require_compressed(facts: Facts, *, steps: int) -> None:
    """Ranks are replicas; the hook ran ``steps`` times on each and saved bytes each time."""
    require_replicas(facts)
    stats = facts["stats"]
    assert stats["steps"] == steps
    assert 0 < stats["wire_bytes"] < stats["raw_bytes"]
    assert 0 < stats["last_step"]["wire_bytes"] < stats["last_step"]["raw_bytes"]


def fit_beside_ddp(
    make: Callable[[], L.LightningModule], *, steps: int, of: Any = None, **arguments: Any
) -> tuple[Facts, Facts]:
    """A model trains with plain DDP, with codec none, to the same bits, and with int8.

    Args:
        steps: that int8 compresses.
        of: arguments of the strategies.

    Returns:
        Facts of DDP and of int8, each with its ``model``.
    """
    found = []
    for strategy in (plain, lossless, compressed):
        model = make()
        found.append(fit(model, strategy(**(of or {})), **arguments) | {"model": model})
    of_ddp, of_none, of_int8 = found
    require_equal(of_none["parameters"], of_ddp["parameters"])
    require_compressed(of_int8, steps=steps)
    return of_ddp, of_int8


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


@contextmanager
def alone() -> Iterator[None]:
    """A world of this rank, as if torchrun had started a single process."""
    size, store = dist.get_world_size(), _get_default_store()
    before = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    number = store.add(f"alone {before['RANK']}", 1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.destroy_process_group()
    meet(dist.HashStore(), 0, 1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        os.environ.update(before)
        meet(dist.PrefixStore(f"{number} after alone", store), int(before["RANK"]), size)
