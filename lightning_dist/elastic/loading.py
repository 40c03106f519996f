"""A user's DataLoader, made elastic."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_dist.elastic.order import EpochOrder
from lightning_dist.elastic.plan import EpochPlan
from lightning_dist.elastic.sampling import Cursor, ElasticBatchSampler, EpochSetter
from lightning_dist.elastic.seeds import derive_seed
from lightning_dist.elastic.streams import Shardable, ShardedStream


class NotExactError(ValueError):
    """A loader whose samples cannot be seen exactly once over restarts; says why."""


@dataclass(frozen=True)
class LoaderFacts:
    """What a loader says of an epoch.

    Args:
        size: samples of an epoch.
        batch_size: samples of a batch of one rank.
        drop_last: leave out what does not fill a batch.
    """

    size: int
    batch_size: int
    drop_last: bool


def facts_of(loader: Any, *, seed: int = 0) -> LoaderFacts:
    """Read the facts.

    Raises:
        NotExactError: this kind of loader is not understood.
    """
    if not isinstance(loader, DataLoader):
        raise NotExactError(
            f"the position in a {type(loader).__name__} is not known; give one DataLoader"
        )
    if isinstance(loader.dataset, IterableDataset):
        if not isinstance(loader.dataset, Shardable):
            raise NotExactError(
                f"{type(loader.dataset).__name__} is an iterable dataset that does not say how it "
                "is dealt to ranks; give it __len__ and iter_shard(epoch=, start=, step=) "
                "(lightning_dist.elastic.streams.Shardable), or use a map-style dataset"
            )
        if loader.batch_size is None:
            raise NotExactError(
                f"{type(loader.dataset).__name__} makes its batches itself (batch_size=None), so "
                "its samples cannot be counted; let the DataLoader make them"
            )
        return LoaderFacts(len(loader.dataset), loader.batch_size, loader.drop_last)
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler) or type(batches).__name__ != "BatchSampler":
        what = "no batches" if batches is None else f"batches of {type(batches).__name__}"
        raise NotExactError(
            f"the samples of a loader with {what} cannot be dealt anew when the number of ranks "
            "changes; give the DataLoader batch_size= and a sampler"
        )
    size = EpochOrder(loader.sampler, seed=seed).size
    return LoaderFacts(size, batches.batch_size, batches.drop_last)


def shard(
    loader: DataLoader[Any],
    plan: Callable[[], EpochPlan],
    *,
    cursor: Cursor,
    seed: int,
    on_first: Callable[[], None] = lambda: None,
) -> DataLoader[Any]:
    """A copy of ``loader`` that yields one rank's share, from ``cursor`` on.

    Everything else of it stays: its class, dataset, workers, collate function. (Workers of an
    iterable dataset are started anew for every epoch: they have to learn where it begins.) The copy
    draws the seeds of its workers from a generator of its own, so that beginning an epoch changes
    none that the training uses.
    """
    assert cursor.begin.epoch == plan().begin.epoch
    made = copy.copy(loader)
    setter = EpochSetter(
        _Sized(plan().size), cursor, world_size=plan().layout.world_size, rank=plan().rank
    )
    generator, rank = torch.Generator(), plan().rank
    cursor.follow(lambda epoch: _seed(generator, derive_seed(seed, "workers", epoch, rank)))
    changed: dict[str, Any] = {
        "batch_size": None,
        "drop_last": False,
        "generator": generator,
        "_iterator": None,
    }
    if isinstance(loader.dataset, IterableDataset):
        changed["dataset"] = ShardedStream(
            loader.dataset,  # type: ignore[arg-type]
            plan,
            on_first=on_first,
        )
        changed["batch_sampler"] = None
        changed["persistent_workers"] = False  # they would keep the plan of their first epoch
    else:
        order = EpochOrder(loader.sampler, seed=seed)
        changed["sampler"] = setter
        changed["batch_sampler"] = ElasticBatchSampler(order, plan, on_first=on_first)
    made.__dict__.update(changed)  # a loader refuses assignments to these after its __init__
    made.__dict__["epoch_setter"] = setter
    return made


def _seed(generator: torch.Generator, seed: int) -> None:
    generator.manual_seed(seed)


class _Sized:
    """Stands for a dataset where only its length is wanted."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size
