"""What all ranks decide together: on real gloo groups."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import Rank, run_threads

from lightning_dist.checkpoint.ranks import Ranks
from lightning_dist.elastic.membership import StopConsensus


def votes(wishes: list[list[bool]]) -> list[list[bool]]:
    """What every rank hears when rank r casts ``wishes[r]``, one after the other."""

    def one(rank: Rank) -> list[bool]:
        vote = StopConsensus(rank.group("votes"), ranks=Ranks(None))
        heard = [vote.ask(wish) for wish in wishes[rank.rank]]
        return [*heard, vote.ask(False)]

    return run_threads(one, len(wishes))


@settings(max_examples=8)
@given(st.integers(2, 4).flatmap(lambda n: st.lists(st.tuples(*[st.booleans()] * n), max_size=5)))
def test_all_hear_at_once_what_any_wished_one_call_before(calls: list[tuple[bool, ...]]) -> None:
    size = len(calls[0]) if calls else 2
    heard = votes([[call[rank] for call in calls] for rank in range(size)])
    assert heard == [[False, *map(any, calls)]] * size


def test_a_rank_alone_has_nobody_to_wait_for() -> None:
    vote = StopConsensus(None, ranks=Ranks(None))
    wishes = [True, False, True, True, False]
    assert [vote.ask(wish) for wish in wishes] == wishes
    assert Ranks(None).gather("x") == ["x"]


def test_a_cast_does_not_wait_for_the_others() -> None:
    early = threading.Event()

    def one(rank: Rank) -> bool:
        vote = StopConsensus(rank.group("votes"), ranks=Ranks(None))
        if rank.rank == 1:
            assert early.wait(20)
        vote.ask(rank.rank == 1)
        early.set()
        return vote.ask(False)

    assert run_threads(one, 2) == [True, True]


def test_values_of_all_ranks_in_their_order() -> None:
    def one(rank: Rank) -> list[object]:
        return Ranks(rank.group("facts")).gather({"rank": rank.rank, "more": "x" * rank.rank})

    expected = [{"rank": rank, "more": "x" * rank} for rank in range(3)]
    assert run_threads(one, 3) == [expected] * 3


def test_other_questions_may_come_between_two_calls() -> None:
    def one(rank: Rank) -> list[object]:
        ranks = Ranks(rank.group("facts"))
        stop = StopConsensus(rank.group("stop"), ranks=ranks)
        stop.ask(rank.rank == 0)
        return [ranks.gather(rank.rank), stop.ask(False)]

    assert run_threads(one, 2) == [[[0, 1], True]] * 2


def test_waits_end_where_they_are_given_up() -> None:
    """Of facts and of the wish to stop: the other rank does not come."""

    def one(rank: Rank) -> None:
        ranks = Ranks(rank.group("facts"))
        stop = StopConsensus(rank.group("stop"), ranks=ranks)
        if rank.rank == 1:
            assert given_up.wait(60)
            return
        stop.ask(False)
        timer = threading.Timer(0.2, ranks.give_up)
        timer.start()
        with pytest.raises(RuntimeError, match="Gave up waiting for"):
            ranks.all({})
        with pytest.raises(RuntimeError, match="Gave up waiting for"):
            ranks.gather("x")
        with pytest.raises(RuntimeError, match="Gave up waiting for the wish to stop"):
            stop.ask(False)
        given_up.set()

    given_up = threading.Event()
    run_threads(one, 2)
