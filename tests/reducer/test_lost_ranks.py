"""Steps whose exchange fails where somebody recovers: given up, or committed by what is here."""

import threading
from collections.abc import Iterable
from typing import Any, Literal, NoReturn

import pytest
import torch
import torch.distributed as dist
from fed_model import SHAPES, Counting, Model, among
from feeding import FakeBucket, Tensors, digest, feed, fitting, held
from threads import of_all, on_threads
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs import CODECS
from lightning_dist.exchange.rounds import Exchange
from lightning_dist.ranks.channel import Channel, PendingWork, WaitLimit
from lightning_dist.ranks.failures import CollectiveError
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.exchange import ExchangeSettings

LAST = 2
"""The rank that vanishes, of three."""
SURVIVORS = [0, 1]
EVERY = [fitting(name) for name in CODECS]
FEW = ["none", "int8", "topk:ratio=0.1,block_size=128", "powersgd:rank=2", "threshold:tau=1.5"]


StateUpdate = Literal["immediate", "deferred"]
both_updates = pytest.mark.parametrize("state_update", ["immediate", "deferred"])


class Told:
    """A recovery that knows the result of a vote beforehand, and takes note."""

    def __init__(self, result: bool | None = None, *, pauses: bool = False) -> None:
        self.known, self.wants = result, pauses
        self.errors: list[str] = []
        self.asked = 0

    def pauses(self) -> bool:
        return self.wants

    def failed(self, error: RuntimeError) -> None:
        self.errors.append(str(error))

    def vote_result(self) -> bool | None:
        self.asked += 1
        return self.known


class Lost:
    """A collective whose end this rank does not hear of."""

    def __init__(self, work: PendingWork) -> None:
        self._work = work

    def wait(self) -> NoReturn:
        self._work.wait()
        raise CollectiveError("Connection closed by peer")


def lose_answer(network: Network) -> None:
    """This rank takes part in votes and does not hear their answer."""
    vote = network.control.all_reduce
    network.control.all_reduce = lambda *a, **k: Lost(vote(*a, **k))  # type: ignore[method-assign]


def leave(limits: Iterable[WaitLimit]) -> None:
    """Be gone. Others wait 0.3 s more; they may have been here long before a slow machine."""
    for each in limits:
        each.seconds = 0.3


def leave_before_the_vote(network: Network, limits: Iterable[WaitLimit]) -> None:
    def gone(*arguments: Any, **named: Any) -> NoReturn:
        leave(limits)
        raise CollectiveError("this rank is gone")

    network.control.all_reduce = gone  # type: ignore[method-assign]


def owed(model: Model) -> Tensors:
    return {name: of.double().clone() for name, of in model.reducer.residuals.items()}


def state_of(model: Model) -> str:
    return digest([*held(model.reducer), torch.zeros(1)])


def take(model: Model, rank: int, step: int) -> list[Tensor]:
    """The means of a step; local gradients where it has failed."""
    return [each.clone() for each in model.step(rank, step)]


@pytest.mark.parametrize("where", ["in the exchange", "before the vote"])
@pytest.mark.parametrize("codec", FEW)
@both_updates
def test_a_step_that_nobody_has_committed_is_given_up_and_taken_again(
    state_update: StateUpdate, codec: str, where: str
) -> None:
    """The hook does not raise, and state is as before; what survivors owe is conserved."""
    before: list[Tensors] = [{}, {}]
    after: list[Tensors] = [{}, {}]
    both = threading.Barrier(2, timeout=60)

    def body(rank: Rank) -> list[str]:
        model = Model(rank.network(), codec, state_update=state_update)
        told = Told()
        model.reducer.leave_failures_to(told)
        limits = of_all(rank, model.reducer.network.limit)
        for step in range(2):
            model.step(rank.rank, step)
        if rank.rank == LAST:
            if where == "before the vote":
                leave_before_the_vote(model.reducer.network, limits)
                take(model, rank.rank, 2)
            else:
                leave(limits)
            model.reducer.close()
            return []
        state, kept = state_of(model), owed(model)
        before[rank.rank] = kept
        take(model, rank.rank, 2)
        assert model.reducer.step == 2
        assert len(told.errors) == 1
        assert told.asked == (where == "before the vote")
        assert state_of(model) == state
        take(model, rank.rank, 2)  # nothing is exchanged before it is rebound
        assert (model.reducer.step, len(told.errors)) == (2, 1)
        both.wait()
        model.reducer.rebind(among(rank, SURVIVORS, "second"))
        means = take(model, rank.rank, 2)
        assert model.reducer.step == 3
        after[rank.rank] = owed(model)
        both.wait()
        if codec.partition(":")[0] not in ("dgc", "none", "bf16", "fp16") and kept:
            for mean, name in zip(means, SHAPES, strict=True):
                fed = [feed(r, 2, SHAPES)[name].flatten().double() for r in SURVIVORS]
                there = [each[name] for each in after]
                here = [each[name] for each in before]
                given = torch.stack([f + h for f, h in zip(fed, here, strict=True)]).mean(0)
                found = mean.double() + torch.stack(there).mean(0)
                torch.testing.assert_close(found, given, rtol=1e-5, atol=1e-5)
        digests = [digest(means), digest(model.step(rank.rank, 3))]
        model.reducer.close()
        return digests

    first, second, _ = run_threads(body, 3)
    assert first == second
    assert first


@both_updates
@pytest.mark.parametrize("codec", FEW)
@on_threads(2)
def test_a_step_that_is_abandoned_changes_no_state(
    rank: Rank, state_update: StateUpdate, codec: str
) -> None:
    """Though the first bucket was decoded while the second one travelled: it is not ready yet."""
    shapes = {"first": (40, 48), "second": (33, 50), "third": (16, 16)}
    model = Model(rank.network(), codec, state_update=state_update, shapes=shapes)
    model.reducer.leave_failures_to(Told())
    model.step(rank.rank, 0)
    state, given = state_of(model), feed(rank.rank, 1, shapes)
    for number, (name, parameter) in enumerate([*model.parameters.items()][:2]):
        bucket = FakeBucket(given[name].flatten().clone(), [parameter], number, last=False)
        future = model.buckets.reduce(bucket)
        model.reducer._executor.drain()
        assert not future.done()
    model.reducer.abandon()
    model.reducer._executor.drain()
    assert state_of(model) == state
    model.reducer.close()


@both_updates
@on_threads(2)
def test_a_step_after_loading_is_undone_to_what_was_loaded(
    rank: Rank, state_update: StateUpdate
) -> None:
    """Not to the copy of the state that was taken after the step before."""
    model = Model(rank.network(), state_update=state_update)
    model.reducer.leave_failures_to(Told())
    model.step(rank.rank, 0)
    state, saved = state_of(model), of_all(rank, model.reducer.state_dict())[0]
    model.step(rank.rank, 1)
    assert state_of(model) != state
    model.reducer.load_state_dict(saved)
    model.begin(feed(rank.rank, 1, SHAPES), 1)
    model.reducer.abandon()
    model.reducer._executor.drain()
    assert state_of(model) == state
    model.reducer.close()


@on_threads(3)
def test_ranks_that_owe_for_other_parameters_are_saved_together(rank: Rank) -> None:
    """What is small is compressed, and owed for, between two ranks and not among three."""

    def model_in(network: Network) -> Model:
        model = Model(network, "int8", shapes={"bias": (6,), "weight": (40, 48)})
        model.reducer.leave_failures_to(Told())
        return model

    if rank.rank != LAST:
        model = model_in(among(rank, SURVIVORS, "two"))
        model.step(rank.rank, 0)
        assert {*model.reducer.residuals} == {"bias", "weight"}
    rank.barrier.wait()
    network = among(rank, [0, 1, LAST], "three")
    if rank.rank == LAST:
        model = model_in(network)
        model.reducer.join({"step": 1, "factors": {}})
    else:
        model.reducer.rebind(network)
    first, *others = of_all(rank, model.reducer.state_dict())
    assert first["residuals"]["bias"].shape == (3, 6)
    assert not first["residuals"]["bias"][LAST].any()
    assert others == [None, None]
    model.step(rank.rank, 1)
    assert (model.reducer.state_dict() is not None) == (rank.rank == 0)
    model.step(rank.rank, 2)
    model.reducer.close()


@pytest.mark.parametrize(
    ("members", "codec"),
    [*(([0, 1, 2], codec) for codec in EVERY), *(([0, 1, 2, 3], codec) for codec in FEW)],
    ids=str,
)
@both_updates
@on_threads("members")
def test_a_rank_that_has_missed_the_answer_commits_by_itself(
    rank: Rank, state_update: StateUpdate, members: list[int], codec: str
) -> None:
    """To the bits of a run in which it has heard the answer, with nobody's help.

    Three ranks are on nodes of their own, four on two nodes.
    """
    ends, per_host = [], len(members) // 2
    for misses in (False, True):
        model = Model(
            among(rank, members, f"{misses}", per_host=per_host), codec, state_update=state_update
        )
        told = Told(result=True)
        model.reducer.leave_failures_to(told)
        digests = [digest(model.step(rank.rank, 0))]
        if misses and rank.rank == 1:
            lose_answer(model.reducer.network)
        digests += [digest(model.step(rank.rank, 1)), state_of(model)]
        assert model.reducer.step == 2
        assert told.asked == (misses and rank.rank == 1)
        if rank.rank != members[-1]:
            model.reducer.rebind(among(rank, members[:-1], f"second {misses}", per_host=per_host))
            digests.append(digest(model.step(rank.rank, 2)))
        model.reducer.close()
        ends.append(digests)
    quiet, faulty = ends
    assert quiet == faulty
    assert len({*of_all(rank, quiet[1])}) == 1


@on_threads(3)
def test_the_result_that_a_step_was_not_finite_is_taken_as_it_was(rank: Rank) -> None:
    """A rank that did not hear of another's inf does not commit what it owes."""
    model = Model(rank.network(), "int8")
    model.reducer.leave_failures_to(Told(result=False))
    model.step(rank.rank, 0)
    state, given = state_of(model), feed(rank.rank, 1, SHAPES)
    if rank.rank == 1:
        lose_answer(model.reducer.network)
    if rank.rank == 0:
        given["first"][0, 0] = torch.inf
    means = [future.wait() for future in model.begin(given)]
    assert state_of(model) == state
    assert not model.reducer.answer.finite
    assert means[0].isnan().all()
    assert len({*of_all(rank, digest(means))}) == 1
    model.reducer.close()


@both_updates
def test_nobody_votes_before_all_its_payloads_have_landed(
    state_update: StateUpdate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the answer knows that all others can commit without any other rank."""
    landed: dict[int, set[Exchange]] = {}
    votes: list[int] = []
    wait = Exchange.wait

    def noted(exchange: Exchange) -> None:
        wait(exchange)
        landed.setdefault(threading.get_ident(), set()).add(exchange)

    monkeypatch.setattr(Exchange, "wait", noted)

    def body(rank: Rank) -> None:
        model = Model(rank.network(), "none", state_update=state_update)
        model.reducer.leave_failures_to(Told())
        vote = model.reducer.network.control.all_reduce

        def counted(*arguments: Any, **named: Any) -> PendingWork:
            votes.append(len(landed.get(threading.get_ident(), ())))
            return vote(*arguments, **named)

        model.reducer.network.control.all_reduce = counted  # type: ignore[method-assign]
        model.step(rank.rank, 0)
        model.reducer.close()

    run_threads(body, 2)
    assert votes == [2, 2]  # one for each of two buckets


@pytest.mark.parametrize("size", [1, 3])
@on_threads("size")
def test_one_rank_that_wants_to_pause_is_heard_by_all(rank: Rank, size: int) -> None:
    model = Model(rank.network(), "none")
    told = Told()
    model.reducer.leave_failures_to(told)
    said = []
    for step in range(3):
        told.wants = step == 1 and rank.rank == size - 1
        model.step(rank.rank, step)
        said.append(model.reducer.answer.pauses)
    model.reducer.close()
    assert said == [False, True, False]


@on_threads(3)
def test_no_collective_more_than_the_vote(rank: Rank) -> None:
    """With a codec that keeps residuals, which asks for finiteness anyway: not one more."""
    counts = []
    for recovers in (False, True):
        model, counting = Model(rank.network(), "int8"), Counting()
        if recovers:
            model.reducer.leave_failures_to(Told())
        for channel in model.reducer.network.channels:
            channel.watch = counting
        for step in range(1, 3):
            model.step(rank.rank, step)
        counts.append(len(counting.found))
        model.reducer.close()
    without, with_recovery = counts
    assert without == with_recovery > 0


@on_threads(2)
def test_mistakes_are_still_raised(rank: Rank) -> None:
    model = Model(rank.network(), "int8")
    model.reducer.leave_failures_to(Told())

    def mistaken(*arguments: Any, **named: Any) -> NoReturn:
        raise ValueError("a mistake")

    model.reducer.network.data.all_gather = mistaken  # type: ignore[method-assign]
    for future in model.begin(feed(rank.rank, 0, SHAPES)):
        with pytest.raises(RuntimeError, match=r"a mistake|earlier"):
            future.wait()
    model.reducer.close()


@pytest.mark.parametrize(
    ("settings", "absent", "match"),
    [
        ({"delay": 1}, False, r"delay=1"),
        ({"state_update": "deferred"}, True, r"find_unused_parameters"),
    ],
)
@on_threads(2)
def test_settings_that_need_other_ranks_to_commit_are_refused(
    rank: Rank, settings: Any, absent: bool, match: str
) -> None:
    names: dict[Tensor, str] = {torch.zeros(4, 4): "weight"}
    checked = ExchangeSettings("int8", **settings)
    reducer = Reducer(names, settings=checked, network=rank.network(), allow_absent=absent)
    with pytest.raises(ValueError, match=match):
        reducer.leave_failures_to(Told())
    reducer.close()


def test_a_collective_that_is_aborted_while_the_host_looks_is_not_complete() -> None:
    """That of an accelerator has ended, and says so, with whatever was in memory."""
    limit = WaitLimit(on_host=True)

    class Aborted(dist.Work):
        looks = 0

        def is_completed(self) -> bool:
            self.looks += 1
            if self.looks == 3:
                limit.give_up()
            return self.looks >= 3

        def wait(self, timeout: object = None) -> bool:
            return True

    with pytest.raises(CollectiveError, match="Gave up the sum, which may have been aborted"):
        limit.wait(Aborted(), what="the sum", on_stream=True)


def test_nothing_is_sent_in_groups_that_were_given_up() -> None:
    """They are the same objects when they have other members."""

    def one(rank: Rank) -> None:
        channel = Channel(rank.group("given up"), limit=WaitLimit())
        channel.limit.give_up()
        with pytest.raises(CollectiveError, match="Gave up"):
            channel.all_reduce(torch.ones(1))

    run_threads(one, 2)
