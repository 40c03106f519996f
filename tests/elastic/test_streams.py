"""Iterable datasets, dealt to ranks."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from plans import Epoch, epochs
from streaming import Numbers, Rank

from lightning_dist.elastic.data.plan import Layout
from lightning_dist.elastic.data.streams import Shardable, ShardedStream


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
