"""What all ranks decide together: on real gloo groups."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import Rank, run_threads

from lightning_dist.elastic.vote import Vote


def votes(wishes: list[list[bool]]) -> list[list[bool]]:
    """What every rank hears when rank r casts ``wishes[r]``, one after the other."""

    def one(rank: Rank) -> list[bool]:
        vote = Vote(rank.group("votes"))
        heard = [vote.cast(wish) for wish in wishes[rank.rank]]
        return [*heard, vote.cast(False)]

    return run_threads(one, len(wishes))


@settings(max_examples=8)
@given(st.integers(2, 4).flatmap(lambda n: st.lists(st.tuples(*[st.booleans()] * n), max_size=5)))
def test_all_hear_at_once_what_any_wished_one_call_before(calls: list[tuple[bool, ...]]) -> None:
    size = len(calls[0]) if calls else 2
    heard = votes([[call[rank] for call in calls] for rank in range(size)])
    assert heard == [[False, *map(any, calls)]] * size


def test_a_rank_alone_has_nobody_to_wait_for() -> None:
    vote = Vote(None)
    wishes = [True, False, True, True, False]
    assert [vote.cast(wish) for wish in wishes] == wishes
    assert vote.are_equal(3)
    assert vote.gather("x") == ["x"]


def test_a_cast_does_not_wait_for_the_others() -> None:
    early = threading.Event()

    def one(rank: Rank) -> bool:
        vote = Vote(rank.group("votes"))
        if rank.rank == 1:
            assert early.wait(20)
        vote.cast(rank.rank == 1)
        early.set()
        return vote.cast(False)

    assert run_threads(one, 2) == [True, True]


@pytest.mark.parametrize(
    ("values", "equal"),
    [([4, 4, 4], True), ([0, 0, 1], False), ([-1, 1, 0], False), ([2**60] * 3, True)],
)
def test_whether_all_have_the_same(values: list[int], equal: bool) -> None:
    got = run_threads(lambda r: Vote(r.group("votes")).are_equal(values[r.rank]), 3)
    assert got == [equal] * 3


def test_large_numbers_are_told_apart() -> None:
    got = run_threads(lambda r: Vote(r.group("votes")).are_equal(2**60 + r.rank), 2)
    assert got == [False, False]


def test_values_of_all_ranks_in_their_order() -> None:
    def one(rank: Rank) -> list[object]:
        return Vote(rank.group("votes")).gather({"rank": rank.rank, "more": "x" * rank.rank})

    expected = [{"rank": rank, "more": "x" * rank} for rank in range(3)]
    assert run_threads(one, 3) == [expected] * 3


def test_other_questions_may_come_between_two_casts() -> None:
    def one(rank: Rank) -> list[object]:
        vote = Vote(rank.group("votes"))
        vote.cast(rank.rank == 0)
        return [vote.are_equal(rank.rank), vote.gather(rank.rank), vote.cast(False)]

    assert run_threads(one, 2) == [[False, [0, 1], True]] * 2
