"""A global batch, dealt to any number of ranks; laws of plans, wherever an epoch is resumed."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import Epoch, constant, epochs, layouts, relaid, steps_of

from lightning_dist.elastic.data.plan import (
    BatchPolicy,
    EpochPlan,
    Layout,
    Position,
    full_size,
    layout_for,
    lr_factor,
)
from lightning_dist.elastic.settings import RunSettings

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
        "batch_policy must be one of 'fixed_global_batch', 'scale_lr', 'scale_lr:sqrt', "
        "'fixed_micro_batch'; got 'scale'"
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
