"""Hierarchical exchanges of which a rank or a host is lost: two hosts of two ranks."""

from __future__ import annotations

import gc
import threading
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import pytest
import torch
from fed_model import SHAPES, Model, among
from feeding import digest, feed
from test_lost_ranks import Commit, Told, both_commits, leave_before_the_vote, state_of
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.exchange.channel import Channel

EXACT = "topk:ratio=0.1,block_size=128,values=fp32"
FOUR = [0, 1, 2, 3]


def leave_in_the_host(channel: Channel) -> None:
    """Be gone when the means of a step are given to the other ranks of the host."""

    def gone(*arguments: Any, **named: Any) -> NoReturn:
        raise RuntimeError("this rank is gone")

    channel.all_gather = gone  # type: ignore[method-assign]
    channel.broadcast = gone  # type: ignore[method-assign]


def fed(members: list[int], step: int) -> Tensor:
    given = [feed(each, step, SHAPES, torch.float64) for each in members]
    return torch.cat([torch.stack([of[name] for of in given]).mean(0).flatten() for name in SHAPES])


def owed(model: Model) -> Tensor:
    """Mean residual of all rows; on the first rank."""
    state = model.reducer.state_dict()
    if state is None:
        return torch.zeros(())
    return torch.cat([state["residuals"][name].mean(0) for name in SHAPES])


@pytest.mark.parametrize("where", ["before the vote", "in the host", "in the exchange"])
@pytest.mark.parametrize("left", [[0, 1, 2], [0, 1]], ids=["a rank", "a host"])
@both_commits
def test_only_residuals_of_lost_ranks_are_lost(commit: Commit, left: list[int], where: str) -> None:
    """In float64: of survivors, and of those that join them again."""
    before = [torch.zeros(())] * 4
    fours, lefts = threading.Barrier(4, timeout=60), threading.Barrier(len(left), timeout=60)

    def body(rank: Rank) -> list[str]:
        own, digests = rank.rank, []
        exact = partial(Model, codec=EXACT, commit=commit, dtype=torch.float64)
        model = exact(among(rank, FOUR, "first", per_host=2))
        assert model.reducer.network.intra is not None
        model.reducer.leave_failures_to(Told())
        for step in range(2):
            model.step(own, step)
        if own not in left:
            if where == "before the vote":
                leave_before_the_vote(model.reducer.network)
                model.step(own, 2)
            elif where == "in the host":
                assert model.reducer.network.intra is not None
                leave_in_the_host(model.reducer.network.intra.data)
                model.step(own, 2)
            model.reducer.close()
            model = exact(among(rank, [own], "alone"))
            model.reducer.leave_failures_to(Told())
        else:
            model.reducer.network.limit.seconds = 0.3
            state = state_of(model)
            before[own] = model.reducer.state.packed()
            model.step(own, 2)
            assert model.reducer.step == 2
            assert state_of(model) == state
            lefts.wait()
            rows = 2 if len(left) == 3 else 1
            expected = torch.stack([before[each] for each in left]).sum(0) / rows
            for phase, members in enumerate((left, FOUR)):
                if phase:
                    fours.wait()
                model.reducer.rebind(among(rank, members, f"phase {phase}", per_host=2))
                mean = owed(model)
                if own == 0:
                    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)
                step = 2 + phase
                means = torch.cat(model.step(own, step))
                digests.append(digest([means]))
                now = owed(model)
                if own == 0:
                    given = fed(members, step) + mean
                    torch.testing.assert_close(means + now, given, rtol=0, atol=1e-12)
                    assert now.abs().max() > 0
                expected = now
        if own not in left:
            fours.wait()
            network = among(rank, FOUR, "phase 1", per_host=2)
            model.reducer.rebind(network, averages=len(left) == 3)
            model.reducer.join({"step": 3, "factors": {}})
            owed(model)
            digests.append(digest([torch.cat(model.step(own, 3))]))
            owed(model)
        model.reducer.close()
        return digests[-1:]

    ranks = run_threads(body, 4)
    assert all(each == ranks[0] for each in ranks)


@pytest.mark.parametrize("per_host", [1, 2], ids=["flat", "hierarchical"])
def test_the_groups_of_before_are_given_back_at_once(per_host: int) -> None:
    """Not by the garbage collector, which may come much later."""
    quiet = threading.Barrier(4, timeout=60, action=gc.disable)
    both = threading.Barrier(4, timeout=60)

    def body(rank: Rank) -> None:
        model = Model(among(rank, FOUR, "first", per_host=per_host))
        model.reducer.leave_failures_to(Told())
        model.step(rank.rank, 0)
        before = ref(model.reducer.network)
        channel = ref(model.reducer.network.data)
        quiet.wait()
        model.reducer.rebind(among(rank, FOUR, "second", per_host=per_host))
        assert before() is None
        assert channel() is None
        both.wait()
        model.step(rank.rank, 1)
        model.reducer.close()

    try:
        run_threads(body, 4)
    finally:
        gc.enable()
