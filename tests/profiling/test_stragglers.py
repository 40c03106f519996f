"""A rank is named where it is clearly the last, and nobody where it is chance."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from planted import MS, Planted

from lightning_dist.profiling.analysis.stragglers import Waits
from lightning_dist.profiling.analysis.summarize import summarize


def waits(*steps: dict[int, int]) -> Waits:
    found = Waits()
    for step in steps:
        found.add([step])
    return found


def named(found: Waits, *, uncertainty: int = 0, waiters: int = 1) -> int | None:
    most = found.most()
    if most is None or found.why_not(most, uncertainty=uncertainty, waiters=waiters):
        return None
    return most


def test_ranks_that_are_equally_late_are_hardly_ever_named() -> None:
    rng = random.Random(0)
    runs = [
        waits(*({rng.randrange(2): rng.randrange(1, 2000)} for _ in range(steps)))
        for steps in (3, 5, 10, 50, 400)
        for _ in range(100)
    ]
    assert sum(named(run) is not None for run in runs) <= 10  # of 500
    most = [run.most() for run in runs]
    assert {0, 1} <= set(most)


@pytest.mark.parametrize(
    ("steps", "who"),
    [
        ([{1: 9}] * 3, None),
        ([{1: 9}] * 4, 1),
        ([{1: 9}, {}, {}] * 4, 1),  # every third step
        ([{1: 9}, {0: 1}, {1: 1}] * 6, 1),
        ([{1: 2}, {0: 2}, {1: 2}] * 20, 1),
        ([{1: 6}, {0: 4}] * 100, None),  # three fifths of the waiting
        ([{1: 900}, *[{0: 1}, {1: 1}] * 40], None),  # one step only
        ([], None),
    ],
)
def test_who_is_named(steps: Sequence[dict[int, int]], who: int | None) -> None:
    assert named(waits(*steps)) == who


def test_nobody_is_named_by_less_than_clocks_are_uncertain() -> None:
    late = waits(*[{1: 30}] * 10)  # 10 of each of three waiters
    assert named(late, uncertainty=9, waiters=3) == 1
    assert named(late, uncertainty=10, waiters=3) is None


def test_a_run_whose_clocks_are_no_better_than_that() -> None:
    sure = summarize(Planted(late={1: 50}, uncertainty=1).run())
    vague = summarize(Planted(late={1: 50}, uncertainty=51).run())
    assert (sure.straggler, sure.exposed_straggler) == (1, 1)
    assert (vague.straggler, vague.exposed_straggler) == (None, None)
    assert "waiting for each other" in vague.headline
    assert vague.reasons["straggler"] == (
        "no rank is clearly the last: clocks are no more certain than what rank 1 was late"
    )
    assert vague.ranks[0].wait_ms * MS > 0  # all the same
