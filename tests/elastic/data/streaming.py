"""Datasets and loaders for tests; importable by workers that are started afresh."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_dist.elastic.data.plan import EpochPlan, Layout, Position
from lightning_dist.elastic.data.sampling import Cursor
from lightning_dist.elastic.data.sharding import shard


class Squares(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index * index


class Numbers(IterableDataset[int]):
    """Sample ``p`` of epoch ``e`` is ``1000 e + p``."""

    def __init__(self, size: int, *, really: int | None = None) -> None:
        self.size = size
        self.really = size if really is None else really

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return self.iter_shard(epoch=0, start=0, step=1)

    def iter_shard(self, *, epoch: int, start: int, step: int) -> Iterator[int]:
        return iter(range(1000 * epoch + start, 1000 * epoch + self.really, step))


def as_list(samples: list[Any]) -> list[Any]:
    """A collate function that changes nothing."""
    return list(samples)


@dataclass
class Rank:
    """What a trainer does with the loader of one rank."""

    layout: Layout
    rank: int
    size: int
    cursor: Cursor = field(default_factory=Cursor)
    lock: Any = field(default_factory=threading.Lock)
    """As a trainer, it is nothing that a pickle could hold."""

    def plan(self) -> EpochPlan:
        return EpochPlan(self.layout, self.rank, self.cursor.begin, self.size)

    def shard(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        return shard(loader, self.plan, cursor=self.cursor, seed=1)

    def expected(self) -> list[list[int]]:
        """Positions of every pass that is left, one that is repeated for a rank without."""
        plan = self.plan()
        left = range(plan.first_micro_batch, len(plan))
        return [list(plan.micro_batch_at(index).samples) for index in left]

    def go_to(self, epoch: int) -> None:
        self.cursor.set_epoch(epoch)

    def resume(self, *, samples: int, steps: int) -> None:
        self.cursor.begin = Position(self.cursor.begin.epoch, samples, steps)
