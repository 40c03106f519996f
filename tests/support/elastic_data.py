"""Train dataloaders of every kind, for tests of what a restart makes of them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from elastic_runs import SIZE, Numbered
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

_QUIET = Numbered(noisy=False)


class Stream(IterableDataset):
    """Says how it is dealt to ranks."""

    def __len__(self) -> int:
        return SIZE

    def iter_shard(self, *, epoch: int, start: int, step: int) -> Iterator[Any]:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(epoch)).tolist()
        return (_QUIET[index] for index in order[start::step])

    def __iter__(self) -> Iterator[Any]:
        return self.iter_shard(epoch=0, start=0, step=1)


class DrawingStream(Stream):
    """Draws from torch's generator for every sample."""

    def iter_shard(self, *, epoch: int, start: int, step: int) -> Iterator[Any]:
        for index, x in super().iter_shard(epoch=epoch, start=start, step=step):
            yield index, x + 0.1 * torch.rand(())


class SilentStream(IterableDataset):
    """Says nothing."""

    def __iter__(self) -> Iterator[Any]:
        return (_QUIET[index] for index in range(SIZE))


class StatefulStream(IterableDataset):
    """Knows where it is."""

    def __init__(self) -> None:
        self.index = 0

    def __iter__(self) -> Iterator[Any]:
        while self.index < SIZE:
            self.index += 1
            yield _QUIET[self.index - 1]
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


LOADERS: dict[str, Callable[[], Any]] = {
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "stream, workers that stay": lambda: DataLoader(
        Stream(), batch_size=4, num_workers=2, persistent_workers=True
    ),
    "map-style, workers that stay": lambda: DataLoader(
        _QUIET,
        batch_size=4,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
    ),
    "map-style, stateful loader": lambda: StatefulDataLoader(
        Numbered(), batch_size=4, shuffle=True
    ),
    "map-style, stateful loader, workers": lambda: StatefulDataLoader(
        _QUIET, batch_size=4, shuffle=True, num_workers=2
    ),
    "stateful stream": lambda: StatefulDataLoader(StatefulStream(), batch_size=4),
    "stateful stream, worker": lambda: StatefulDataLoader(
        StatefulStream(), batch_size=4, num_workers=1
    ),
}
