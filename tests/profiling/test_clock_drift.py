"""Clocks between and beyond their readings: never further off than they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import MS, Planted, replace, replaced

from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import ClockRecord
from lightning_dist.profiling.run import RankRun, Run

SECOND = 1000 * MS
HOUR = 3600 * SECOND
ABOUT = Planted(steps=0).run().ranks[1].metadata
SAYS = 120_000
"""Nanoseconds of a usual reading."""


def reads(*clocks: ClockRecord) -> RankRun:
    return RankRun(ABOUT, {}, clocks=clocks)


def test_a_clock_is_less_certain_the_longer_ago_it_was_read() -> None:
    run = reads(ClockRecord(0, 5, SAYS))
    assert (run.offset(HOUR), run.offset(-HOUR)) == (5, 5)
    assert run.uncertainty(0) == SAYS
    # Two quartz clocks may part by 50 ppm each.
    for at in (HOUR, -HOUR):
        assert run.uncertainty(at) == SAYS + HOUR // 10_000
    assert run.uncertainty(HOUR) < run.uncertainty(2 * HOUR)


def test_a_drift_that_two_readings_tell_goes_on_before_and_after_them() -> None:
    drift = 40  # nanoseconds in a millisecond
    later = 600 * SECOND
    run = reads(ClockRecord(0, 0, SAYS), ClockRecord(later, later * drift // MS, SAYS))
    for at in (-HOUR, later // 2, later + HOUR):
        assert run.offset(at) == at * drift // MS
    assert run.uncertainty(0) == run.uncertainty(later) == SAYS
    assert SAYS <= run.uncertainty(later // 2) < 2 * SAYS + MS
    beyond = run.uncertainty(later + HOUR)
    assert beyond is not None
    # The drift is known to twice that in ten minutes; alone a reading would say 360 ms.
    assert SAYS + 12 * SAYS <= beyond < 10 * MS


def test_readings_that_are_too_close_tell_no_drift() -> None:
    run = reads(ClockRecord(0, 0, SAYS), ClockRecord(MS, SAYS, SAYS))
    assert run.offset(HOUR) == SAYS
    assert run.uncertainty(MS + HOUR) == SAYS + HOUR // 10_000


def test_the_clock_of_rank_0_is_certain_for_ever() -> None:
    run = reads(ClockRecord(0, 0, 0), ClockRecord(SECOND, 0, 0))
    assert [run.uncertainty(at) for at in (-HOUR, 7, HOUR)] == [0, 0, 0]
    assert reads().uncertainty(7) is None


@given(
    shift=st.integers(-HOUR, HOUR),
    drift=st.integers(-100, 100),
    readings=st.lists(
        st.tuples(st.integers(0, HOUR), st.integers(1, 50 * MS), st.floats(-1, 1)),
        min_size=1,
        max_size=4,
        unique_by=lambda each: each[0],
    ),
    at=st.integers(-HOUR, 2 * HOUR),
)
def test_no_clock_is_further_off_than_it_says(
    shift: int, drift: int, readings: list[tuple[int, int, float]], at: int
) -> None:
    def truth(at: int) -> int:
        return shift + at * drift // 1_000_000

    clocks = [
        ClockRecord(when, truth(when) + round(error * says), says)
        for when, says, error in sorted(readings)
    ]
    run = reads(*clocks)
    says = run.uncertainty(at)
    assert says is not None
    assert abs(run.offset(at) - truth(at)) <= says + 5  # nanoseconds of rounding


def an_hour_later(run: Run) -> Run:
    """Its steps; clocks were read at the begin, and the training was killed."""
    for rank, each in run.ranks.items():
        steps = {
            number: replace(step, begin=step.begin + HOUR) for number, step in each.steps.items()
        }
        run = replaced(run, rank, steps=steps, clocks=each.clocks[:1])
    return run


def test_a_run_that_was_killed_says_how_uncertain_its_clocks_are() -> None:
    planted = Planted(late={1: 50}, uncertainty=SAYS / MS)
    finished, killed = summarize(planted.run()), summarize(an_hour_later(planted.run()))
    assert finished.ranks[1].clock_uncertainty_ms == pytest.approx(SAYS / MS, abs=0.01)
    assert finished.straggler == 1
    assert finished.notes == []
    assert killed.ranks[1].clock_uncertainty_ms == pytest.approx(360, abs=1)
    assert killed.straggler is None
    assert "the clock uncertainty is as large as" in killed.unavailable["straggler"]
    (note,) = killed.notes
    assert note.startswith("clocks are uncertain by 360 ms")
