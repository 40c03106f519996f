"""The order of an epoch, of seed and epoch alone, and iterable datasets that are dealt to ranks."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
    EpochSetter,
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


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_after_a_restart(name: str) -> None:
    before = EpochOrder(SAMPLERS[name](), seed=5)
    orders = [list(before.of(epoch)) for epoch in range(4)]
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    after = EpochOrder(SAMPLERS[name](), seed=5)
    for epoch in (2, 0, 3, 3, 1):
        assert list(after.of(epoch)) == orders[epoch]
    assert all(orders[0] != order for order in orders[1:])


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_from_the_same_sampler_once_more(name: str) -> None:
    """A second fit of a process asks the sampler that the first one has drawn from."""
    sampler = SAMPLERS[name]()
    first = EpochOrder(sampler, seed=5)
    orders = [list(first.of(epoch)) for epoch in range(3)]
    second = EpochOrder(sampler, seed=5)
    assert [list(second.of(epoch)) for epoch in range(3)] == orders


@pytest.mark.parametrize("name", SAMPLERS)
def test_nobody_else_draws_other_numbers(name: str) -> None:
    sampler = SAMPLERS[name]()
    order = EpochOrder(sampler, seed=5)
    own = getattr(sampler, "generator", None)
    own_before = None if own is None else own.get_state()
    before = rng.capture()
    order.of(1)
    after = rng.capture()
    assert torch.equal(before.pop("torch"), after.pop("torch"))
    assert before == after
    if own is not None:
        assert torch.equal(own.get_state(), own_before)


def test_the_seed_of_the_run_counts_and_not_what_a_generator_was_seeded_with() -> None:
    def order(seed: int, own: int | None = None) -> list[int]:
        generator = None if own is None else torch.Generator().manual_seed(own)
        return list(EpochOrder(RandomSampler(DATA, generator=generator), seed=seed).of(0))

    assert order(1) != order(2)
    assert order(1, own=7) == order(1, own=8) != order(2, own=7)


@given(st.integers(1, 50), st.integers(0, 2**32 - 1), st.integers(0, 9))
def test_every_sample_once(size: int, seed: int, epoch: int) -> None:
    order = EpochOrder(RandomSampler(range(size)), seed=seed)
    assert order.size == size
    assert sorted(order.of(epoch)) == list(range(size))


def test_a_sequence_takes_no_memory() -> None:
    order = EpochOrder(SequentialSampler(range(10**12)), seed=0)
    assert order.of(3) == range(10**12)


@pytest.mark.parametrize(("shuffle", "size"), [(True, 20), (False, 20)])
def test_a_distributed_sampler_stands_for_its_whole_dataset(shuffle: bool, size: int) -> None:
    sampler = DistributedSampler(DATA, num_replicas=3, rank=2, shuffle=shuffle, drop_last=True)
    order = EpochOrder(sampler, seed=0)
    assert order.size == size
    assert sorted(order.of(0)) == list(range(size))
    assert (list(order.of(0)) == list(range(size))) is not shuffle


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


def test_a_sampler_without_a_length() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(ValueError, match=r"has no len\(\)\; give it a __len__$"):
        _ = EpochOrder(Endless(), seed=0).size


def test_a_sampler_whose_length_is_wrong() -> None:
    class Short(SequentialSampler):
        def __len__(self) -> int:
            return 21

    message = "A sampler must yield as many samples as its len(), 21; Short gave 20 in "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}epoch 6$"):
        EpochOrder(Short(DATA), seed=0).of(6)


def test_a_distributed_sampler_of_ones_own() -> None:
    class Own(DistributedSampler[int]):
        pass

    message = (
        "Own shards samples itself; elastic restart does that, for any number of ranks: give the "
        "loader a sampler for a single process"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        EpochOrder(Own(DATA, num_replicas=2, rank=0), seed=0)


def sampler(epoch: Epoch, rank: int) -> ElasticBatchSampler:
    order = EpochOrder(RandomSampler(range(epoch.size)), seed=1)
    return ElasticBatchSampler(order, lambda: epoch.plan(rank))


@given(epochs())
def test_batches_are_the_passes_of_the_plan(epoch: Epoch) -> None:
    order = EpochOrder(RandomSampler(range(epoch.size)), seed=1).of(epoch.begin.epoch)
    for rank, plan in enumerate(epoch.plans):
        batches = list(sampler(epoch, rank))
        passes = [plan.micro_batch_at(index) for index in range(plan.first_micro_batch, len(plan))]
        for batch, each in zip(batches, passes, strict=True):
            if each.samples:
                assert batch == [order[position] for position in each.samples]
            else:
                assert len(batch) == 1
                assert each.weight == 0
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


def test_an_epoch_that_is_over_has_no_batches() -> None:
    begin = Position(0, 12, 2)
    order = EpochOrder(SequentialSampler(range(12)), seed=0)
    over = ElasticBatchSampler(order, lambda: EpochPlan(Layout(2, 3, 1, 6), 0, begin, 12))
    assert list(over) == []
    assert len(over) == 2


def test_a_resumed_epoch_is_not_begun_again() -> None:
    cursor = Cursor()
    cursor.begin = resumed = Position(3, 40, 5)
    cursor.set_epoch(3)
    assert cursor.begin is resumed
    cursor.set_epoch(4)
    assert cursor.begin == Position(4)
    cursor.set_epoch(3)
    assert cursor.begin == Position(3)


@pytest.mark.parametrize("epoch", [0, 7])
def test_a_trainer_tells_the_epoch_to_its_sampler(epoch: int) -> None:
    cursor = Cursor()
    setter = EpochSetter(range(10), cursor, world_size=2, rank=1)
    setter.set_epoch(epoch)
    assert cursor.begin == replace(Position(), epoch=epoch)
    assert setter.epoch == epoch


@given(epochs())
def test_lists_are_the_passes_of_the_plan(epoch: Epoch) -> None:
    first = 1000 * epoch.begin.epoch
    for plan in epoch.plans:
        stream = ShardedStream(Numbers(epoch.size), lambda plan=plan: plan)
        got = list(stream)
        passes = [
            plan.micro_batch_at(index).samples for index in range(plan.first_micro_batch, len(plan))
        ]
        for samples, positions in zip(got, passes, strict=True):
            assert samples == [first + p for p in positions] or (not positions and samples)
            assert len(samples) == max(len(positions), 1)
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


def test_it_follows_the_epoch() -> None:
    rank = Rank(Layout(2, 2, 1, 4), 1, size=8)
    stream = ShardedStream(Numbers(8), rank.plan)
    rank.resume(samples=4, steps=1)
    assert list(stream) == [[5, 7]]
    rank.go_to(1)
    assert list(stream) == [[1001, 1003], [1005, 1007]]


def test_a_rank_without_a_sample_takes_one_of_no_weight() -> None:
    rank = Rank(Layout(3, 2, 1, 6), 2, size=8)
    rank.go_to(2)
    plan = rank.plan()
    assert list(ShardedStream(Numbers(8), rank.plan)) == [[2002, 2005], [2000]]
    assert plan.micro_batch_at(1).weight == 0


def test_a_length_that_is_too_large() -> None:
    rank = Rank(Layout(2, 2, 1, 4), 1, size=8)
    message = (
        "An epoch of Numbers has 8 samples by its len(), but iter_shard ended before that; make "
        "len() exact"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        list(ShardedStream(Numbers(8, really=7), rank.plan))


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
