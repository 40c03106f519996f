"""The batches of a rank, from wherever training goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from plans import Epoch, epochs
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_dist.elastic.plan import EpochPlan, Layout, Position
from lightning_dist.elastic.sampling import Cursor, ElasticBatchSampler, EpochOrder, EpochSetter


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
