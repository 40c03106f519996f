"""Ranks that wait for each other where nothing is exchanged."""

from __future__ import annotations

import json

import numpy as np
import pytest
from planted import Planted, replace, replaced

from lightning_dist.profiling.analysis.imbalance import find_phase_skew
from lightning_dist.profiling.analysis.parts import PhaseSkew, Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.analysis.tables import COLUMNS, step_table
from lightning_dist.profiling.capture.events import PHASES, StepRecord
from lightning_dist.profiling.report.files import to_json
from lightning_dist.profiling.report.tables import ranks_table
from lightning_dist.profiling.run import Run

FOUR = Planted(world_size=4, late_data={2: 40}, meets_in_forward=True)
BUFFERS = Planted(late_data={0: 50}, meets_in_forward=True)
"""Rank 0 is late, and rank 1 waits for it before the forward pass."""


def found(planted: Planted | Run) -> Summary:
    summary = summarize(planted.run() if isinstance(planted, Planted) else planted)
    told = [note for note in summary.notes if "is counted in these phases" in note]
    assert len(told) == bool(summary.phase_skew)
    return summary


def what(planted: Planted | Run) -> list[tuple[str, list[int], int, float]]:
    return [
        (each.phase, [*each.ranks], each.fastest_rank, each.excess_ms)
        for each in found(planted).phase_skew
    ]


@pytest.mark.parametrize(
    "planted",
    [
        Planted(),
        Planted(late={0: 50}),
        Planted(late_data={0: 50}),
        Planted(late_data={0: 50}, codec="ddp", encode=0, decode=0),
        Planted(late_data={0: 50}, transfer=5, backward=400),  # waiting is hidden
        Planted(world_size=4, late={1: 30, 3: 70}, shift={2: -9}),
        Planted(world_size=3, late_data={1: 30}, late={2: 70}),  # nobody waits for rank 1
        Planted(late_data={0: 50}, uncertainty=None),
        Planted(world_size=1, buckets=0),
        Planted(late_data={0: 9}, meets_in_forward=True),  # 8 % of the step
        replace(BUFFERS, buckets=0),  # what is waiting is not known
        replace(BUFFERS, steps=5),  # three steps may be chance
        replace(BUFFERS, steps=0),
    ],
)
def test_waiting_that_exchanges_show_is_no_news(planted: Planted) -> None:
    assert what(planted) == []


def test_waiting_before_the_exchange_is_reported() -> None:
    summary = found(BUFFERS)
    assert summary.ranks[1].wait_ms == pytest.approx(0), "in exchanges"
    assert [*summary.phase_skew] == [
        PhaseSkew("between_steps", [0], 1, 50.0),
        PhaseSkew("forward", [1], 0, 50.0),
    ]


def test_of_many_that_wait_none_is_left_out() -> None:
    assert what(FOUR) == [("between_steps", [2], 0, 40), ("forward", [0, 1, 3], 2, 40)]
    assert "forward (ranks 0, 1, 3: +40.0 ms)" in found(FOUR).notes[0]
    assert "forward (11 of 12 ranks: +40.0 ms)" in found(replace(FOUR, world_size=12)).notes[0]


def test_a_rank_that_waits_longer_than_half_as_long_is_reported_too() -> None:
    planted = replace(FOUR, late_data={0: 40, 1: 10, 2: 25})
    assert what(planted) == [("between_steps", [0, 2], 3, 40), ("forward", [3, 1], 0, 40)]


def test_a_late_rank_may_wait_more_than_those_that_wait_for_it() -> None:
    """As one whose gradients the leader of its host exchanges: it waits for the leader's links."""

    def phases(waited: int) -> list[PhaseSkew]:
        """Rank 1 waits so long for rank 0, whose data take 200 ns longer in every step."""
        table = step_table(Planted(steps=5).run(), range(5))
        values = np.zeros((5, 2, len(COLUMNS)))
        values[..., COLUMNS.index("duration")] = 1000
        values[..., COLUMNS.index("exchange")] = 1
        values[:, 0, COLUMNS.index("between_steps")] = 200
        values[:, 0, COLUMNS.index("waited")] = 4000 / 5
        values[:, 1, COLUMNS.index("waited")] = waited / 5
        waited_for = np.array([[0.0, 4000.0], [waited, 0.0]])
        return find_phase_skew(replace(table, values=values, waited_for=waited_for))

    assert not phases(600)
    assert phases(400)


def test_late_in_some_steps_only_is_chance() -> None:
    """A single pause in data, after which rank 1 waits before its forward pass."""
    planted = replace(BUFFERS, steps=12)
    quiet, late = replace(planted, late_data={}).run(), planted.run()

    def mixed(steps: set[int]) -> Run:
        run = quiet
        for rank, each in quiet.ranks.items():
            of_rank = {**each.steps, **{step: late.ranks[rank].steps[step] for step in steps}}
            run = replaced(run, rank, steps=of_rank)
        return run

    assert what(mixed({3, 7, 9})) == []
    assert len(what(mixed({2, 4, 6, 8, 10}))) == 2


def moved(run: Run, rank: int, **milliseconds: int) -> Run:
    """A rank that takes longer in phases of every step; its exchanges are as they were."""

    def longer(record: StepRecord) -> StepRecord:
        phases, at = [], 0
        for each in record.phases:
            end = at + each.end - each.begin + 1_000_000 * milliseconds.get(each.name, 0)
            phases.append(replace(each, begin=at, end=end))
            at = end
        return replace(record, phases=phases, duration=at)

    steps = {number: longer(each) for number, each in run.ranks[rank].steps.items()}
    return replaced(run, rank, steps=steps)


@pytest.mark.parametrize(
    ("of_0", "of_1", "late"),
    [
        ({"optimizer": 30}, {"between_steps": 30}, "rank 0 (optimizer)"),
        ({"optimizer": 30}, {"forward": 30}, "rank 0 (optimizer)"),
        ({"forward": 30}, {"between_steps": 30}, "rank 1 (between steps)"),
    ],
)
def test_who_is_late_is_who_is_longer_first(
    of_0: dict[str, int], of_1: dict[str, int], late: str
) -> None:
    """After an exchange, which all leave together."""
    run = moved(moved(Planted(late_data={0: 1}).run(), 0, **of_0), 1, **of_1)
    (note,) = [each for each in found(run).notes if each.startswith("ranks differ")]
    assert note.endswith(f"; late: {late}")


def test_without_one_who_waits_elsewhere_nobody_is_said_to_be_late() -> None:
    (note,) = found(moved(Planted(late_data={0: 1}).run(), 1, forward=30)).notes
    assert note.startswith("ranks differ: forward (rank 1: +30.0 ms); waiting in")
    assert note.endswith("is counted in these phases")


def test_who_has_waited_before_an_exchange_is_not_to_blame_in_it() -> None:
    """Rank 1 comes 10 ms late to the exchange, after it has waited 50 ms for rank 0."""
    buffers = replace(BUFFERS, buckets=1)  # what is waited for it is exposed
    summary = found(replace(buffers, late={1: 10}))
    assert summary.straggler is None
    assert summary.unavailable["straggler"] == "ranks differ more outside exchanges"
    assert "Straggler" not in summary.headline
    alone = found(Planted(late={1: 10}, buckets=1))
    assert alone.straggler == 1
    more = found(replace(buffers, late={1: 60}))  # more than what it has waited
    assert more.straggler == 1
    assert more.headline.endswith(" Straggler: rank 1.")


def test_phases_of_the_ranks_are_there_for_all_to_see() -> None:
    summary = found(BUFFERS)
    told = json.loads(to_json(summary.as_dict()))
    assert [each["phases_ms"] for each in told["ranks"]] == [
        {"between_steps": 52, "forward": 20, "backward": 40, "optimizer": 5},
        {"between_steps": 2, "forward": 70, "backward": 40, "optimizer": 5},
    ]
    assert told["phase_skew"][0] == {
        "phase": "between_steps",
        "ranks": [0],
        "fastest_rank": 1,
        "excess_ms": 50,
    }
    table = ranks_table(summary)
    assert tuple(each.key for each in table.columns[6:10]) == PHASES
    assert table.rows[1][6:10] == ("2.00", "70.0", "40.0", "5.00")


def test_a_forward_pass_that_is_in_backward_is_no_zero() -> None:
    run = Planted().run()
    for rank, each in run.ranks.items():
        steps = {
            number: replace(step, phases=[p for p in step.phases if p.name != "forward"])
            for number, step in each.steps.items()
        }
        run = replaced(run, rank, steps=steps)
    assert [each.phases_ms["forward"] for each in summarize(run).ranks] == [None, None]
