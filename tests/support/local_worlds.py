"""Workers in threads that take local steps, and their twin in whole tensors."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import threads
import torch
from torch import Tensor, nn
from worlds import Rank

from lightning_dist import local_updates
from lightning_dist.codecs import TopK
from lightning_dist.sync.local.anchor import Fragment
from lightning_dist.sync.local.outer_steps import LocalUpdates

WIDTH = 24
T = TypeVar("T")
require_same = partial(torch.testing.assert_close, rtol=0, atol=0)
"""The same bits, of lists and dictionaries of tensors too."""


class Net(nn.Module):
    """A tied weight, a frozen part, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.frozen(torch.tanh(self.norm(self.first(x))))))


def plain(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    model = nn.Sequential(*layers).to(dtype)
    generator = torch.Generator().manual_seed(seed)  # threads share the global one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return model


def batches(rank: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    while True:
        yield torch.randn(8, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)


@dataclass
class Worker:
    """One rank's training."""

    rank: int
    model: Any
    optimizer: torch.optim.Optimizer
    updates: LocalUpdates
    data: Iterator[Tensor]

    def learn(self) -> None:
        """One step of the optimizer."""
        self.optimizer.zero_grad()
        self.model(next(self.data)).square().mean().backward()
        self.optimizer.step()

    samples: Callable[[int, int], float] | None = None

    def train(self, steps: int, *, poison: int | None = None) -> None:
        for step in range(steps):
            self.learn()
            if step == poison and self.rank == 0:
                with torch.no_grad():
                    next(self.model.parameters())[0, 0] = float("inf")
            if self.samples is None:
                self.updates.step()
            else:
                self.updates.step(self.samples(self.rank, self.updates.attempted + 1))

    def parts(self) -> Sequence[Fragment]:
        return self.updates.anchor.fragments

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def anchors(self) -> list[Tensor]:
        return [
            a.detach().clone()
            for g in self.updates.outer_optimizer.param_groups
            for a in g["params"]
        ]


@dataclass
class World:
    """One rank, and the workers that it has had."""

    rank: Rank
    stack: ExitStack

    def worker(
        self,
        model: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer] = adam,
        **settings: Any,
    ) -> Worker:
        optimizer = make(model.parameters())
        settings = {"groups": self.rank.groups(), "min_compress_numel": 0, **settings}
        updates = local_updates(model, optimizer, **settings)
        self.stack.callback(updates.close)
        dtype = next(model.parameters()).dtype
        rank = self.rank.rank
        return Worker(rank, model, optimizer, updates, batches(rank, dtype))

    def of_all(self, value: T) -> list[T]:
        """Copies of what every rank gives."""
        given = copy.deepcopy(value)  # which no rank changes while others copy it
        return copy.deepcopy(threads.of_all(self.rank, given))


@contextmanager
def _world(rank: Rank) -> Iterator[World]:
    with ExitStack() as stack:  # ends exchanges
        yield World(rank, stack)


on_threads = partial(threads.on_threads, having=_world)
"""A test that runs in a thread for each rank, and has their `World`."""


@dataclass
class Twin:
    """All workers one after the other, on whole tensors, in float64: the rules as in the papers."""

    workers: int
    sync_every: int
    lr: float = 1.0
    momentum: float = 0.0
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0
    samples: Callable[[int, int], float] = lambda rank, step: 1.0
    codec: TopK | None = None
    """Of matrices; of what a worker owes it forgets a part."""

    def __post_init__(self) -> None:
        self._owed: dict[tuple[int, int], Tensor] = {}

    def sent(self, worker: int, i: int, change: Tensor) -> Tensor:
        """Of a worker's change of parameter ``i``."""
        if self.codec is None or change.dim() < 2:
            return change
        before = self._owed.get((worker, i), torch.zeros_like(change))
        owed = (self.codec.decay * before + change).float()
        padding = self.codec.block - owed.numel()
        row = nn.functional.pad(owed.view(1, -1), (0, padding))
        sent = self.codec.decode(self.codec.encode(row), torch.float32)
        sent = sent[0, : owed.numel()].view_as(owed)
        self._owed[worker, i] = owed - sent
        return sent.to(change.dtype)

    def train(self, steps: int, make: Callable[[Any], torch.optim.Optimizer]) -> list[list[Tensor]]:
        models = [plain() for _ in range(self.workers)]
        optimizers = [make(model.parameters()) for model in models]
        data = [batches(rank) for rank in range(self.workers)]
        anchor = [p.detach().clone() for p in models[0].parameters()]
        velocity = [torch.zeros_like(a) for a in anchor]
        fragments = self.parts(models[0])
        sent: dict[int, tuple[int, list[Tensor]]] = {}
        before = [0] * len(fragments)
        for step in range(1, steps + 1):
            for model, optimizer, batch in zip(models, optimizers, data, strict=True):
                optimizer.zero_grad()
                model(next(batch)).square().mean().backward()
                optimizer.step()
            for when in ("before", "after"):
                if step in sent:
                    part, means = sent.pop(step)
                    for i, mean in zip(fragments[part], means, strict=True):
                        velocity[i] = self.momentum * velocity[i] + mean
                        anchor[i] = anchor[i] - self.lr * (mean + self.momentum * velocity[i])
                        for model in models:
                            own = list(model.parameters())[i].data
                            own.copy_(self.mixing * own + (1 - self.mixing) * anchor[i])
                interval = self.sync_every // self.fragments
                if when == "before" and step % interval == 0:
                    part = (step // interval - 1) % self.fragments
                    of = [
                        [list(m.parameters())[i].detach() for m in models] for i in fragments[part]
                    ]
                    counts = [
                        sum(self.samples(rank, each) for each in range(before[part] + 1, step + 1))
                        for rank in range(self.workers)
                    ]
                    before[part] = step
                    means = [
                        sum(
                            n * self.sent(worker, i, anchor[i] - each)
                            for worker, (n, each) in enumerate(zip(counts, own, strict=True))
                        )
                        / sum(counts)
                        for i, own in zip(fragments[part], of, strict=True)
                    ]
                    sent[step + self.overlap] = part, means
        return [[p.detach() for p in model.parameters()] for model in models]

    def parts(self, model: nn.Module) -> list[list[int]]:
        """The same cut as ours where fragments are layers."""
        count = len(list(model.parameters()))
        if self.fragments == 1:
            return [list(range(count))]
        assert self.fragments == 2
        return [[0, 1], [2, 3, 4, 5]]


def unequal(rank: int, step: int) -> float:
    """Samples of a worker's step; now and then none."""
    return float((3 * rank + 1) * (step % 3) * 100)


SCHEDULE = {"sync_every": 6, "fragments": 2, "overlap_steps": 2, "mixing": 0.5, "codec": "int4"}
