"""A rank is named where it is clearly the last, and nobody where it is chance."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from planted import MS, Planted

from lightning_dist.profiling.analysis.imbalance import straggler
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.analysis.tables import COLUMNS, Array, StepTable


def waits(*steps: dict[int, int]) -> Array:
    return np.array([[step.get(rank, 0) for rank in range(2)] for step in steps], dtype=float)


def most(late: Array) -> int:
    return int(late.sum(axis=0).argmax())


def named(late: Array, *, uncertainty: int = 0) -> int | None:
    steps = range(len(late))
    values = np.zeros((len(steps), 2, len(COLUMNS)))
    values[..., COLUMNS.index("late")] = late.reshape(-1, 2)
    values[..., COLUMNS.index("uncertainty")] = uncertainty
    nothing = np.zeros((len(steps), 2))
    table = StepTable(steps, [0, 1], ["a", "b"], values, np.zeros((2, 2)), nothing, {})
    return straggler(table, [])[0]


def test_ranks_that_are_equally_late_are_hardly_ever_named() -> None:
    rng = random.Random(0)
    runs = [
        waits(*({rng.randrange(2): rng.randrange(1, 2000)} for _ in range(steps)))
        for steps in (3, 5, 10, 50, 400)
        for _ in range(100)
    ]
    assert sum(named(run) is not None for run in runs) <= 10  # of 500
    assert {0, 1} <= {most(run) for run in runs}


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
    assert named(late, uncertainty=9 * 3) == 1
    assert named(late, uncertainty=10 * 3) is None


def test_a_run_whose_clocks_are_no_better_than_that() -> None:
    sure = summarize(Planted(late={1: 50}, uncertainty=1).run())
    vague = summarize(Planted(late={1: 50}, uncertainty=51).run())
    assert (sure.straggler, vague.straggler) == (1, None)
    assert sure.headline.endswith(" Straggler: rank 1.")
    assert "Straggler" not in vague.headline
    assert vague.unavailable["straggler"] == (
        "no rank is clearly the last: the clock uncertainty is as large as the delay of rank 1"
    )
    assert vague.ranks[0].wait_ms * MS > 0  # all the same
