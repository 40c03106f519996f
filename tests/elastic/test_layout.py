"""A global batch, dealt to any number of ranks."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import constant, layouts

from lightning_dist.elastic.plan import (
    BatchPolicy,
    Layout,
    layout_for,
    lr_factor,
    require_policy,
)

FIRST = Layout(world_size=4, micro_batch=8, accumulate=2, global_batch=64)


def test_what_a_script_means() -> None:
    assert Layout.of_script(world_size=4, micro_batch=8, accumulate=2) == FIRST


@given(layouts(), st.integers(0, 50), st.integers(0, 50))
def test_every_sample_is_of_one_rank(layout: Layout, begin: int, count: int) -> None:
    shares = [layout.share(r, begin=begin, count=count) for r in range(layout.world_size)]
    assert sorted(p for share in shares for p in share) == list(range(begin, begin + count))
    for rank, share in enumerate(shares):
        assert all(position % layout.world_size == rank for position in share)


@given(layouts(), st.integers(0, 50), st.integers(0, 50))
def test_shares_differ_by_one_sample_at_most(layout: Layout, begin: int, count: int) -> None:
    sizes = [len(layout.share(r, begin=begin, count=count)) for r in range(layout.world_size)]
    assert max(sizes) - min(sizes) <= 1


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
        "batch_policy='fixed_global_batch' deals a global batch of 64 samples to at most as many "
        "ranks; got 65 ranks. Start fewer, or use batch_policy='scale_lr'"
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
        require_policy(policy)
    message = (
        "batch_policy is one of 'fixed_global_batch', 'scale_lr', 'scale_lr:sqrt', "
        "'fixed_micro_batch'; got 'scale'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        require_policy("scale")
