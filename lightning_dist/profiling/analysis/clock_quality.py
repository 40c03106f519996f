"""Offsets between the clocks of ranks, and their uncertainty."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_dist.profiling.capture.events import ClockRecord

if TYPE_CHECKING:  # which reads clocks with this module
    from lightning_dist.profiling.run import RankRun, Run

DRIFT = 1e-4
"""Most by which two clocks part: quartz is specified to be off by 50 in a million."""

_WANDER = 1e-6
"""By about so much the rate of a quartz changes with its temperature within hours."""


def offset_at(readings: Sequence[ClockRecord], at: int) -> int:
    """Nanoseconds to add to the clock when it shows ``at``; 0 without readings.

    Between two of the ``readings``, which are in order, it drifts evenly, and before the first and
    after the last one as it did between the nearest two. Where these are too close to tell the
    drift, or there is only one, it stays.
    """
    if not readings:
        return 0
    left, right = _around(readings, at)
    if left.at <= at <= right.at:
        part = (at - left.at) / max(right.at - left.at, 1)
        return round(left.offset + part * (right.offset - left.offset))
    nearest = right if at > right.at else left
    if _doubt(left, right) >= DRIFT:
        return nearest.offset
    rate = (right.offset - left.offset) / (right.at - left.at)
    return nearest.offset + round((at - nearest.at) * rate)


def uncertainty_at(readings: Sequence[ClockRecord], at: int) -> int | None:
    """Bound of the error of :func:`offset_at` in nanoseconds; None: never compared.

    It grows with the time to the nearest reading, by what is not known of the drift.
    """
    if not readings:
        return None
    if not any(each.uncertainty for each in readings):
        return 0  # the same clock: from itself nobody drifts
    left, right = _around(readings, at)
    if left.at <= at <= right.at:
        part = (at - left.at) / max(right.at - left.at, 1)
        read = left.uncertainty + part * (right.uncertainty - left.uncertainty)
        return round(read + _WANDER * min(at - left.at, right.at - at))
    nearest = right if at > right.at else left
    return round(nearest.uncertainty + abs(at - nearest.at) * min(_doubt(left, right), DRIFT))


def _around(readings: Sequence[ClockRecord], at: int) -> tuple[ClockRecord, ClockRecord]:
    """Readings before and after ``at``, or the nearest two; the only one twice."""
    after = bisect_right(readings, at, key=lambda reading: reading.at)
    after = min(max(after, 1), len(readings) - 1)
    return readings[max(after - 1, 0)], readings[after]


def _doubt(left: ClockRecord, right: ClockRecord) -> float:
    """Bound of the error of the drift beyond two readings, as a share of time."""
    apart = right.at - left.at
    return (left.uncertainty + right.uncertainty) / apart + _WANDER if apart else DRIFT


def uncompared(run: Run) -> list[int]:
    """Ranks whose clock has nothing to do with rank 0's: another host, and never compared."""
    host = run.ranks[0].about.host if 0 in run.ranks else None
    return [
        rank
        for rank, each in run.ranks.items()
        if rank != 0 and not each.clocks and each.about.host != host
    ]


def groups_of_one_clock(run: Run) -> dict[int, frozenset[str]]:
    """Groups of every rank whose members all read the same clock."""
    clocks = {rank: _clock_of(run, rank) for rank in run.ranks}
    return {
        rank: frozenset(
            name
            for name, members in each.about.groups.items()
            if len({clocks.get(member) for member in members}) == 1
        )
        for rank, each in run.ranks.items()
    }


def _clock_of(run: Run, rank: int) -> tuple[int, int] | str:
    """The same for ranks of one machine, where one compares the clocks for all."""
    of_rank = run.ranks[rank]
    if not of_rank.clocks:
        return of_rank.about.host
    first = of_rank.clocks[0]
    if first.uncertainty == 0 and 0 in run.ranks:  # rank 0's own
        return run.ranks[0].about.host
    return first.offset, first.uncertainty


def uncertainty_of(rank: RankRun, steps: Sequence[int]) -> int | None:
    """Nanoseconds of its clock at the worst of these steps; None: never compared."""
    if not rank.clocks:
        return None
    at_steps = (rank.uncertainty(rank.head(step).begin) for step in steps if step in rank.steps)
    return max((each or 0 for each in at_steps), default=rank.clocks[0].uncertainty)


def mean_uncertainty(run: Run, steps: Sequence[int]) -> int:
    """Nanoseconds of the rank whose clock is the least certain, the mean over these steps."""
    worst = [
        max((uncertainty_of(each, [step]) or 0 for each in run.ranks.values()), default=0)
        for step in steps
    ]
    return round(sum(worst) / max(len(worst), 1))
