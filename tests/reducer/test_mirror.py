"""Residuals of lost ranks, which the rank behind each has a copy of."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fed_model import SHAPES, Model, among
from feeding import feed, residuals
from threads import of_all, on_threads
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.reducer.mirror import ResidualMirror
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState

NAMES = ["a", "b", "c", "d", "new"]
CODECS = ["int8", "topk:ratio=0.1,block_size=128", "powersgd:rank=2", "int4:block_size=64"]


@on_threads(3)
def test_a_copy_comes_from_the_rank_before(rank: Rank) -> None:
    """Of any length and in float64; nothing where that rank has no residuals."""
    model = Model(rank.network())
    mirror = ResidualMirror(model.reducer, every=1)
    mirror.regroup(NAMES[:3])
    state, cpu = model.reducer.state, torch.device("cpu")
    state.keep_only({})
    if rank.rank:
        part = ParameterSlice(NAMES[rank.rank], 0, (rank.rank + 1,))
        own = state.per_rank("residual", part, dtype=torch.float64, device=cpu)
        own.copy_(torch.arange(rank.rank + 1) + 10 * rank.rank)
    mirror.refresh(rank.group("ring"))
    assert mirror.regroup([NAMES[rank.rank]]) == NAMES[(rank.rank - 1) % 3]
    model.reducer.close()
    b, c = {"b": [10.0, 11.0]}, {"c": [20.0, 21.0, 22.0]}
    found = {name: (3 * held).tolist() for name, held in state.residuals.items()}
    assert found == (c, b, {**b, **c})[rank.rank]


@on_threads(2)
def test_a_copy_waits_no_longer_than_a_step_for_a_silent_rank(rank: Rank) -> None:
    model, ring = Model(rank.network(), "int8"), rank.group("ring")
    model.step(rank.rank, 0)
    if rank.rank == 0:
        model.reducer.network.limit.seconds = 0.3
        mirror = ResidualMirror(model.reducer, every=1)
        mirror.regroup(["a", "b"])
        with pytest.raises(RuntimeError, match=r"within 0\.3 s"):
            mirror.refresh(ring)
    model.reducer.close()


def test_a_copy_fits_a_state_that_has_changed_meanwhile() -> None:
    """Other numbers of ranks need other residuals: of small parameters for instance."""
    state, cpu = ReducerState(), torch.device("cpu")
    parts = {name: ParameterSlice(name, 0, (4,)) for name in "abc"}
    for name in "bc":
        state.per_rank("residual", parts[name], dtype=torch.float32, device=cpu).fill_(1.0)
    layout, packed = state.layout, state.packed() * torch.arange(1.0, 9.0)
    state.per_rank("residual", parts["a"], dtype=torch.float32, device=cpu)
    state.drop("residual", "c")
    state.add(packed, layout)
    state.scale(2.0)
    expected = {"a": [0.0] * 4, "b": [4.0, 6.0, 8.0, 10.0], "c": [10.0, 12.0, 14.0, 16.0]}
    assert {name: held.tolist() for name, held in state.residuals.items()} == expected


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten().double() for name in SHAPES])


def mean_fed(members: list[int], step: int) -> Tensor:
    return torch.stack([flat(feed(each, step, SHAPES)) for each in members]).mean(0)


@pytest.mark.parametrize(
    ("codec", "lost"),
    [
        pytest.param(codec, lost, marks=() if at == of % 3 else pytest.mark.slow)
        for of, codec in enumerate(CODECS)
        for at, lost in enumerate(([1], [0, 2], [3]))
    ],
)
def test_no_gradient_is_lost_with_a_rank(codec: str, lost: list[int]) -> None:
    """Sum of the means + what is owed == sum of the mean gradients: ranks are lost, one joins.

    The twin adds up in float64 what ranks were fed, and knows nothing of codecs or copies.
    """
    left = [rank for rank in range(4) if rank not in lost]
    phases = [(range(4), 0), (left, 3), ([*left, 4], 6)]
    owed: dict[int, Tensor] = {}
    shared: dict[str, Any] = {}
    all_five = threading.Barrier(5, timeout=60)

    def body(rank: Rank) -> None:
        number, total, fed = rank.rank, torch.zeros(()), torch.zeros(())
        model: Model | None = None
        for ranks, begin in phases:
            members, name = list(ranks), f"from {begin}"
            all_five.wait()
            if number in members:
                if model is None:
                    model = Model(among(rank, members, name), codec)
                    mirror = ResidualMirror(model.reducer, every=1)
                    if begin:
                        model.reducer.join(shared)
                else:
                    model.reducer.rebind(among(rank, members, name))
                taken = mirror.regroup([NAMES[each] for each in members])
                is_behind = begin == 3 and (number - 1) % 4 in lost
                assert taken == (NAMES[(number - 1) % 4] if is_behind else "")
                for step in range(begin, begin + 3):
                    total = total + torch.cat(model.step(number, step)).double()
                    fed = fed + mean_fed(members, step)
                    mirror.refresh(rank.group(f"ring {name}", members))
                owed[number] = flat(model.reducer.residuals)
                shared.update(model.reducer.shared_state())
            all_five.wait()
            if number in members and number != 4:
                mean = torch.stack([owed[each] for each in members]).mean(0)
                assert mean.abs().max() > 1e-3
                torch.testing.assert_close(total + mean, fed, rtol=1e-5, atol=1e-5)
        assert model is not None
        model.reducer.close()

    run_threads(body, 5)


@on_threads(2)
def test_a_copy_of_before_is_older_by_as_many_steps(rank: Rank) -> None:
    model = Model(rank.network(), "topk:ratio=0.1,block_size=128")
    mirror = ResidualMirror(model.reducer, every=2)
    mirror.regroup(NAMES[:2])
    for step in range(3):
        model.step(rank.rank, step)
        mirror.refresh(rank.group("ring"))
        if step == 1:
            kept = of_all(rank, model.reducer.state.packed())
    before = model.reducer.state.packed()
    model.reducer.rebind(among(rank, [rank.rank], "alone"))
    assert mirror.regroup([NAMES[rank.rank]]) == NAMES[1 - rank.rank]
    torch.testing.assert_close(model.reducer.state.packed(), (before + kept[1 - rank.rank]) / 2)
    model.reducer.close()


@on_threads(2)
def test_a_copy_is_of_the_parameters_of_its_rank(rank: Rank) -> None:
    """Ranks keep names of a smaller world, which one that has joined since does not know."""
    model = Model(rank.network())
    mirror = ResidualMirror(model.reducer, every=1)
    mirror.regroup(NAMES[:2])
    model.step(rank.rank, 0)
    state, names = model.reducer.state, sorted(["a name that sorts first", *SHAPES])
    if rank.rank == 0:
        part, cpu = ParameterSlice(names[0], 0, (5,)), torch.device("cpu")
        state.per_rank("residual", part, dtype=torch.float32, device=cpu).fill_(3.0)
    kept = of_all(rank, residuals(model.reducer))
    mirror.refresh(rank.group("ring"))
    if rank.rank == 1:
        model.reducer.rebind(among(rank, [1], "alone"))
        assert mirror.regroup([NAMES[1]]) == NAMES[0]
        found = model.reducer.residuals
        for name in names:
            torch.testing.assert_close(found[name], sum(of.get(name, 0.0) for of in kept) / 2)
    model.reducer.close()
