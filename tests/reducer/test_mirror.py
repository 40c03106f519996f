"""Ranks and nodes that are lost: residuals that the rank behind has a copy of, hierarchies."""

import gc
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import pytest
import torch
from fed_model import SHAPES, Model, among
from feeding import digest, feed, residuals
from test_lost_ranks import StateUpdate, Told, both_updates, leave, leave_before_the_vote, state_of
from threads import of_all, on_threads
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.elastic.recovery.regroup import ResidualMirror
from lightning_dist.ranks.channel import Channel, WaitLimit
from lightning_dist.ranks.failures import CollectiveError
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


EXACT = "topk:ratio=0.1,block_size=128,values=fp32"
FOUR = [0, 1, 2, 3]


def leave_in_the_host(channel: Channel, limits: Iterable[WaitLimit]) -> None:
    """Be gone when the means of a step are given to the other ranks of the node."""

    def gone(*arguments: Any, **named: Any) -> NoReturn:
        leave(limits)
        raise CollectiveError("this rank is gone")

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


@pytest.mark.parametrize("where", ["before the vote", "in the node", "in the exchange"])
@pytest.mark.parametrize("left", [[0, 1, 2], [0, 1]], ids=["a rank", "a node"])
@both_updates
def test_only_residuals_of_lost_ranks_are_lost(
    state_update: StateUpdate, left: list[int], where: str
) -> None:
    """In float64: of survivors, and of those that join them again."""
    before = [torch.zeros(())] * 4
    fours, lefts = threading.Barrier(4, timeout=60), threading.Barrier(len(left), timeout=60)

    def body(rank: Rank) -> list[str]:
        own, digests = rank.rank, []
        exact = partial(Model, codec=EXACT, state_update=state_update, dtype=torch.float64)
        model = exact(among(rank, FOUR, "first", per_host=2))
        assert model.reducer.network.intra is not None
        model.reducer.leave_failures_to(Told())
        limits = of_all(rank, model.reducer.network.limit)
        for step in range(2):
            model.step(own, step)
        if own not in left:
            if where == "before the vote":
                leave_before_the_vote(model.reducer.network, limits)
                model.step(own, 2)
            elif where == "in the node":
                assert model.reducer.network.intra is not None
                leave_in_the_host(model.reducer.network.intra.data, limits)
                model.step(own, 2)
            else:
                leave(limits)
            model.reducer.close()
            model = exact(among(rank, [own], "alone"))
            model.reducer.leave_failures_to(Told())
        else:
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
