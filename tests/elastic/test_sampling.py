"""The order of an epoch, of seed and epoch alone, and iterable datasets that are dealt to ranks."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from plans import Epoch, epochs
from streaming import Numbers, Rank
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_dist.elastic import rng
from lightning_dist.elastic.data.plan import EpochPlan, Layout, Position
from lightning_dist.elastic.data.sampling import (
    Cursor,
    ElasticBatchSampler,
    EpochOrder,
)
from lightning_dist.elastic.data.streams import Shardable, ShardedStream

DATA = range(20)


class Drawn(Sampler[Any]):
    """Draws from every generator that a sampler may draw from."""

    def __iter__(self) -> Iterator[int]:
        torch_order = torch.randperm(20).tolist()
        random.shuffle(torch_order)
        return iter(np.random.permutation(torch_order).tolist())

    def __len__(self) -> int:
        return 20


SAMPLERS = {
    "random": lambda: RandomSampler(DATA),
    "own generator": lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(3)),
    "replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=30),
    "subset": lambda: SubsetRandomSampler([3, 1, 4, 15, 9]),
    "weighted": lambda: WeightedRandomSampler([0.1, 0.5, 0.4], 10),
    "distributed": lambda: DistributedSampler(DATA, num_replicas=3, rank=1, seed=2),
    "drawn": Drawn,
}


def states(sampler: Any) -> tuple[Any, ...]:
    """Of all generators that somebody else may draw from."""
    state, own = rng.capture(), getattr(sampler, "generator", None)
    own_state = None if own is None else own.get_state().tolist()
    return state.pop("torch").tolist(), own_state, state


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_after_a_restart(name: str) -> None:
    """Also from the same sampler, in a second fit of a process; nobody else draws other numbers."""
    sampler = SAMPLERS[name]()
    first = EpochOrder(sampler, seed=5)
    before = states(sampler)
    orders = [list(first.of(epoch)) for epoch in range(4)]
    assert states(sampler) == before
    assert all(orders[0] != order for order in orders[1:])
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    for again in (EpochOrder(sampler, seed=5), EpochOrder(SAMPLERS[name](), seed=5)):
        for epoch in (2, 0, 3, 3, 1):
            assert list(again.of(epoch)) == orders[epoch]


def test_the_seed_of_the_run_counts_and_not_what_a_generator_was_seeded_with() -> None:
    def order(seed: int, own: int | None = None) -> list[int]:
        generator = None if own is None else torch.Generator().manual_seed(own)
        return list(EpochOrder(RandomSampler(DATA, generator=generator), seed=seed).of(0))

    assert order(1) != order(2)
    assert order(1, own=7) == order(1, own=8) != order(2, own=7)


def test_a_sequence_takes_no_memory() -> None:
    order = EpochOrder(SequentialSampler(range(10**12)), seed=0)
    assert order.of(3) == range(10**12)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_stands_for_its_whole_dataset(shuffle: bool) -> None:
    sampler = DistributedSampler(DATA, num_replicas=3, rank=2, shuffle=shuffle, drop_last=True)
    order = EpochOrder(sampler, seed=0)
    assert order.size == 20
    assert sorted(order.of(0)) == [*DATA]
    assert (list(order.of(0)) == [*DATA]) is not shuffle


def test_a_sampler_gets_the_epoch() -> None:
    class Told(Sampler[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch, self.epoch + 1])

        def __len__(self) -> int:
            return 2

    order = EpochOrder(Told(), seed=0)
    assert [list(order.of(epoch)) for epoch in (4, 2)] == [[4, 5], [2, 3]]


def test_indices_of_any_kind() -> None:
    keys = [("a", 1), ("b", 2), ("a", 3)]
    assert EpochOrder(keys, seed=0).of(0) == keys
    assert list(EpochOrder([torch.tensor(2), np.int64(5)], seed=0).of(0)) == [2, 5]


def test_keys_are_drawn_as_if_for_the_first_time() -> None:
    class Keys(Sampler[str]):
        def __iter__(self) -> Iterator[str]:
            return iter([f"key-{i}" for i in torch.randperm(9)])

        def __len__(self) -> int:
            return 9

    assert list(EpochOrder(Keys(), seed=0).of(0)) == list(EpochOrder(Keys(), seed=0).of(0))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


class Short(SequentialSampler):
    def __len__(self) -> int:
        return 21


class Own(DistributedSampler[int]):
    pass


REFUSED: dict[str, Callable[[], object]] = {
    r"has no len\(\)\; give it a __len__$": lambda: EpochOrder(Endless(), seed=0).size,
    r"^A sampler must yield as many samples as its len\(\), 21; Short gave 20 in epoch 6$": (
        lambda: EpochOrder(Short(DATA), seed=0).of(6)
    ),
    r"^Own shards samples itself; elastic restart does that, for any number of ranks: give the "
    r"loader a sampler for a single process$": (
        lambda: EpochOrder(Own(DATA, num_replicas=2, rank=0), seed=0)
    ),
    r"^An epoch of Numbers has 8 samples by its len\(\), but iter_shard ended before that; make "
    r"len\(\) exact$": (
        lambda: list(ShardedStream(Numbers(8, really=7), Rank(Layout(2, 2, 1, 4), 1, 8).plan))
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def passes_of(plan: EpochPlan) -> list[range]:
    """The positions of every pass that is left; of no weight where there are none."""
    passes = [plan.micro_batch_at(index) for index in range(plan.first_micro_batch, len(plan))]
    assert all(each.samples or each.weight == 0 for each in passes)
    return [each.samples for each in passes]


def sampler(epoch: Epoch, rank: int) -> ElasticBatchSampler:
    order = EpochOrder(RandomSampler(range(epoch.size)), seed=1)
    return ElasticBatchSampler(order, lambda: epoch.plan(rank))


@given(epochs())
def test_batches_are_the_passes_of_the_plan(epoch: Epoch) -> None:
    order = EpochOrder(RandomSampler(range(epoch.size)), seed=1).of(epoch.begin.epoch)
    for rank, plan in enumerate(epoch.plans):
        batches = list(sampler(epoch, rank))
        for batch, positions in zip(batches, passes_of(plan), strict=True):
            assert batch == [order[p] for p in positions] or (not positions and len(batch) == 1)
        assert len(sampler(epoch, rank)) == len(plan)


def test_batches_are_drawn_again_for_every_iteration() -> None:
    cursor, started = Cursor(), []

    def plan() -> EpochPlan:
        return EpochPlan(Layout(2, 3, 1, 6), 1, cursor.begin, 12)

    order = EpochOrder(RandomSampler(range(12)), seed=0)
    batches = ElasticBatchSampler(order, plan, on_first=lambda: started.append(cursor.begin))
    for begin in (Position(0, 6, 1), Position(1), Position(2)):
        cursor.begin = begin
        drawn = iter(batches)
        assert begin not in started
        first = next(drawn)
        assert started[-1] == begin
        positions = range(begin.samples + 1, begin.samples + 6, 2)
        assert first == [order.of(begin.epoch)[position] for position in positions]
        assert len(list(drawn)) == 1 - begin.steps
    assert len(started) == 3


def test_a_resumed_epoch_is_not_begun_again() -> None:
    cursor = Cursor()
    cursor.begin = resumed = Position(3, 40, 5)
    cursor.set_epoch(3)
    assert cursor.begin is resumed
    cursor.set_epoch(4)
    assert cursor.begin == Position(4)
    cursor.set_epoch(3)
    assert cursor.begin == Position(3)


@given(epochs())
def test_lists_are_the_passes_of_the_plan(epoch: Epoch) -> None:
    first = 1000 * epoch.begin.epoch
    for plan in epoch.plans:
        stream = ShardedStream(Numbers(epoch.size), lambda plan=plan: plan)
        # The first sample stands in where a rank has none.
        assert list(stream) == [[first + p for p in each or [0]] for each in passes_of(plan)]
        assert len(stream) == len(plan)


def test_a_limited_epoch_reads_no_more() -> None:
    read: list[int] = []

    class Read(Numbers):
        def iter_shard(self, *, epoch: int, start: int, step: int) -> Iterator[int]:
            for each in super().iter_shard(epoch=epoch, start=start, step=step):
                read.append(each)
                yield each

    rank = Rank(Layout(2, 2, 1, 4), 0, size=8)
    assert list(ShardedStream(Read(100), rank.plan)) == [[0, 2], [4, 6]]
    assert read == [0, 2, 4, 6]


def test_a_worker_gets_the_plan_and_not_what_made_it() -> None:
    """A plan is asked of a trainer, which no pickle holds."""
    rank = Rank(Layout(2, 2, 1, 4), 0, size=8)
    rank.go_to(3)
    stream = pickle.loads(pickle.dumps(ShardedStream(Numbers(8), rank.plan)))
    assert list(stream) == [[3000, 3002], [3004, 3006]]
    assert len(stream) == 2


def test_what_is_shardable() -> None:
    class Endless(Numbers):
        __len__ = None

    assert isinstance(Numbers(3), Shardable)
    assert not isinstance(Endless(3), Shardable)
    assert not isinstance([1, 2], Shardable)
