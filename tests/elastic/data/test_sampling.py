"""The order of an epoch, and how it is dealt to any number of ranks, wherever it is resumed."""

import pickle
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import Epoch, constant, epochs, layouts, relaid, steps_of
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
from lightning_dist.elastic.data.plan import (
    BatchPolicy,
    EpochPlan,
    Layout,
    Position,
    full_size,
    layout_for,
    lr_factor,
)
from lightning_dist.elastic.data.sampling import Cursor, ElasticBatchSampler, EpochOrder
from lightning_dist.elastic.data.sharding import Shardable, ShardedStream
from lightning_dist.settings.run import RunSettings

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


FIRST = Layout(world_size=4, micro_batch=8, accumulate=2, global_batch=64)


@given(layouts(), st.integers(0, 50), st.integers(0, 50))
def test_every_sample_is_of_one_rank(layout: Layout, begin: int, count: int) -> None:
    shares = [layout.share(r, begin=begin, count=count) for r in range(layout.world_size)]
    assert sorted(p for share in shares for p in share) == list(range(begin, begin + count))
    for rank, share in enumerate(shares):
        assert all(position % layout.world_size == rank for position in share)


@given(layouts(), st.integers(0, 50))
def test_no_fewer_passes_would_do(layout: Layout, count: int) -> None:
    passes = layout.micro_batches_for(count)
    room = layout.world_size * layout.micro_batch
    assert count <= passes * room
    assert passes == 1 or count > (passes - 1) * room


@pytest.mark.parametrize(
    ("world_size", "micro_batch", "accumulate"),
    [(4, 8, 2), (3, 8, 3), (1, 8, 8), (8, 8, 1), (64, 8, 1), (4, 5, 4), (4, 64, 1), (5, 1, 13)],
)
def test_a_constant_global_batch_takes_other_passes(
    world_size: int, micro_batch: int, accumulate: int
) -> None:
    layout = constant(FIRST, world_size=world_size, micro_batch=micro_batch)
    assert layout == Layout(world_size, micro_batch, accumulate, 64)
    assert layout.micro_batches_for(64) == accumulate


@pytest.mark.parametrize("policy", ["scale_lr", "scale_lr:sqrt", "fixed_micro_batch"])
def test_other_policies_do_what_the_script_says(policy: BatchPolicy) -> None:
    script = Layout.of_script(world_size=6, micro_batch=8, accumulate=3)
    assert layout_for(policy, FIRST, script=script) == script == Layout(6, 8, 3, 144)


def test_more_ranks_than_samples() -> None:
    message = (
        "batch_policy='fixed_global_batch' shards a global batch of 64 samples over at most as "
        "many ranks; got 65 ranks. Start fewer, or use batch_policy='scale_lr'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        constant(FIRST, world_size=65, micro_batch=8)


@pytest.mark.parametrize(
    ("policy", "factor"),
    [
        ("fixed_global_batch", 1.0),
        ("fixed_micro_batch", 1.0),
        ("scale_lr", 0.25),
        ("scale_lr:sqrt", 0.5),
    ],
)
def test_learning_rates_follow_the_global_batch(policy: BatchPolicy, factor: float) -> None:
    script = Layout.of_script(world_size=1, micro_batch=8, accumulate=FIRST.accumulate)
    now = layout_for(policy, FIRST, script=script)
    assert lr_factor(policy, before=FIRST, now=now) == factor
    assert lr_factor(policy, before=now, now=FIRST) == 1 / factor
    assert lr_factor(policy, before=FIRST, now=FIRST) == 1.0


def test_a_policy_that_there_is_not() -> None:
    for policy in ("fixed_global_batch", "scale_lr", "scale_lr:sqrt", "fixed_micro_batch"):
        assert RunSettings("folder", every_n_epochs=1, batch_policy=policy).batch_policy == policy  # type: ignore[arg-type]
    message = (
        "batch_policy must be 'fixed_global_batch', 'scale_lr', 'scale_lr:sqrt' or "
        "'fixed_micro_batch', got 'scale'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RunSettings("folder", batch_policy="scale")  # type: ignore[arg-type]


def taken(epoch: Epoch) -> list[list[int]]:
    """The samples of every step, of all ranks."""
    return [
        sorted(s for passes in step for each in passes for s in each.samples)
        for step in zip(*map(steps_of, epoch.plans), strict=True)
    ]


@given(epochs())
def test_a_step_is_its_samples_each_once(epoch: Epoch) -> None:
    assert taken(epoch) == epoch.steps_of_samples()


@given(epochs())
def test_all_ranks_take_equally_many_passes(epoch: Epoch) -> None:
    shapes = [[len(step) for step in steps_of(plan)] for plan in epoch.plans]
    assert all(shape == shapes[0] for shape in shapes)
    assert all(size <= epoch.layout.accumulate for size in shapes[0])
    assert all(size == epoch.layout.accumulate for size in shapes[0][:-1])
    assert {len(plan) for plan in epoch.plans} == {epoch.plan(0).first_micro_batch + sum(shapes[0])}


@given(epochs())
def test_no_pass_is_larger_than_a_micro_batch(epoch: Epoch) -> None:
    for plan in epoch.plans:
        for step in steps_of(plan):
            sizes = [len(each.samples) for each in step]
            assert max(sizes) <= epoch.layout.micro_batch
            assert max(sizes) - min(sizes) <= 1


@given(epochs(), st.integers(0))
def test_the_mean_over_ranks_and_passes_is_that_over_the_samples(epoch: Epoch, seed: int) -> None:
    draw = random.Random(seed)
    values = [draw.uniform(-1, 1) for _ in range(epoch.size)]
    of_ranks = [steps_of(plan) for plan in epoch.plans]
    layout = epoch.layout
    for step, samples in zip(zip(*of_ranks, strict=True), epoch.steps_of_samples(), strict=True):
        got = 0.0
        for each in (each for passes in step for each in passes):
            if each.samples:
                mean = sum(values[s] for s in each.samples) / len(each.samples)
                got += each.weight * mean / (layout.accumulate * layout.world_size)
            else:
                assert each.weight == 0
        assert got == pytest.approx(sum(values[s] for s in samples) / len(samples), abs=1e-13)


@given(epochs())
def test_positions_are_those_of_whole_steps(epoch: Epoch) -> None:
    plan, begin = epoch.plan(0), epoch.begin
    samples, steps = begin.samples, begin.steps
    for done in range(plan.first_micro_batch + 1):
        assert plan.after(done) == begin
    for index in range(plan.first_micro_batch, len(plan)):
        if plan.micro_batch_at(index).ends_step:
            samples += len(epoch.steps_of_samples()[steps - begin.steps])
            steps += 1
            assert plan.micro_batches_after(steps) == index + 1
        assert plan.after(index + 1) == Position(begin.epoch, samples, steps)
    assert plan.steps == steps
    assert plan.used == samples
    assert plan.after(len(plan) + 5) == plan.after(len(plan))
    assert plan.micro_batches_after(plan.steps + 5) == len(plan)


@given(epochs(), st.data())
def test_another_layout_goes_on_with_the_samples_that_are_left(
    epoch: Epoch, data: st.DataObject
) -> None:
    plan = epoch.plan(0)
    done = data.draw(st.integers(plan.first_micro_batch, max(plan.first_micro_batch, len(plan))))
    begin = plan.after(done)
    layout = data.draw(st.composite(lambda draw: relaid(draw, epoch.layout))())
    resumed = Epoch(layout, begin, epoch.size, epoch.drop_last)
    assert taken(resumed) == taken(epoch)[begin.steps - epoch.begin.steps :]
    assert resumed.plan(0).steps == plan.steps
    assert resumed.plan(0).used == plan.used


def test_an_example() -> None:
    """Ten samples left of a global batch of 8 on 3 ranks, two samples a pass."""
    layout = constant(Layout(4, 2, 1, 8), world_size=3, micro_batch=2)
    plans = [EpochPlan(layout, rank, Position(1, 8, 1), 18) for rank in range(3)]
    got = [
        [[(list(each.samples), each.weight) for each in step] for step in steps_of(plan)]
        for plan in plans
    ]
    assert got[0] == [[([9, 12], 1.5), ([15], 0.75)], [([], 0.0)]]
    assert got[1] == [[([10], 0.75), ([13], 0.75)], [([16], 3.0)]]
    assert got[2] == [[([8, 11], 1.5), ([14], 0.75)], [([17], 3.0)]]
    assert [len(plan) for plan in plans] == [5, 5, 5]
    assert plans[0].after(5) == Position(1, 18, 3)


def test_a_limit_in_passes_is_one_of_whole_steps() -> None:
    layout = Layout(2, 4, 3, 24)
    assert full_size(100, limit=None, layout=layout) == 100
    assert full_size(100, limit=3, layout=layout) == 24
    assert full_size(100, limit=4, layout=layout) == 48
    assert full_size(100, limit=99, layout=layout) == 100
    assert full_size(100, limit=0, layout=layout) == 0
