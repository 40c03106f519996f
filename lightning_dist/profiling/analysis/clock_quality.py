"""How well the clocks of the ranks are known, and whether that is well enough."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_dist.profiling.capture.events import ClockRecord

if TYPE_CHECKING:  # which reads clocks with this module
    from lightning_dist.profiling.analysis.tables import StepTable
    from lightning_dist.profiling.run import RankRun, Run

DRIFT = 1e-4
"""Most by which two clocks part: quartz is specified to be off by 50 in a million."""

_WANDER = 1e-6
"""By about so much the rate of a quartz changes with its temperature within hours."""

_SHARE = 0.1
_LEAST = 2e6  # nanoseconds a step


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
    """By how many nanoseconds :func:`offset_at` may be off at most; None: never compared.

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
    """The two that ``at`` is between, or the nearest two; the same one where there is no other."""
    after = bisect_right(readings, at, key=lambda reading: reading.at)
    after = min(max(after, 1), len(readings) - 1)
    return readings[max(after - 1, 0)], readings[after]


def _doubt(left: ClockRecord, right: ClockRecord) -> float:
    """Nanoseconds in one by which the drift between two readings may not be that beyond them."""
    apart = right.at - left.at
    return (left.uncertainty + right.uncertainty) / apart + _WANDER if apart else DRIFT


def uncompared(run: Run) -> list[int]:
    """Ranks whose clock has nothing to do with rank 0's: another host, and never compared."""
    host = run.ranks[0].metadata.host if 0 in run.ranks else None
    return [
        rank
        for rank, each in run.ranks.items()
        if rank != 0 and not each.clocks and each.metadata.host != host
    ]


def groups_of_one_clock(run: Run) -> dict[int, frozenset[str]]:
    """Groups of every rank whose members all read the same clock."""
    clocks = {rank: _clock_of(run, rank) for rank in run.ranks}
    return {
        rank: frozenset(
            name
            for name, members in each.metadata.groups.items()
            if len({clocks.get(member) for member in members}) == 1
        )
        for rank, each in run.ranks.items()
    }


def _clock_of(run: Run, rank: int) -> tuple[int, int] | str:
    """The same for ranks of one machine, where one compares the clocks for all."""
    of_rank = run.ranks[rank]
    if not of_rank.clocks:
        return of_rank.metadata.host
    first = of_rank.clocks[0]
    if first.uncertainty == 0 and 0 in run.ranks:  # rank 0's own
        return run.ranks[0].metadata.host
    return first.offset, first.uncertainty


def uncertainty_of(rank: RankRun, steps: Sequence[int]) -> int | None:
    """Nanoseconds of its clock at the worst of these steps; None: never compared."""
    if not rank.clocks:
        return None
    at_steps = (rank.uncertainty(rank.head(step).begin) for step in steps if step in rank.steps)
    return max((each or 0 for each in at_steps), default=rank.clocks[0].uncertainty)


def mean_uncertainty(run: Run, steps: Sequence[int]) -> int:
    """The mean over these steps of the rank whose clock is the least certain, in nanoseconds."""
    worst = [
        max((uncertainty_of(each, [step]) or 0 for each in run.ranks.values()), default=0)
        for step in steps
    ]
    return round(sum(worst) / max(len(worst), 1))


def clock_notes(run: Run, table: StepTable) -> list[str]:
    """Doubts about the waiting and transfer of these steps."""
    notes = []
    if strangers := uncompared(run):
        ranks = ", ".join(map(str, strangers))
        notes.append(
            f"no clock of rank {ranks} was compared with rank 0's: who waited follows from how "
            "long exchanges took"
        )
    by_clocks, by_durations = table.total("by_clocks"), table.total("by_durations")
    gap = abs(by_clocks - by_durations)
    if gap > _SHARE * max(by_clocks, by_durations) and gap > _LEAST * table.cells:
        notes.append(
            f"transfer between hosts is {by_clocks / table.cells / 1e6:.1f} ms a step by "
            f"clocks and {by_durations / table.cells / 1e6:.1f} ms by durations: clocks may be "
            "wrong, trust the latter"
        )
    uncertainty = max(uncertainty_of(each, table.steps) or 0 for each in run.ranks.values())
    if uncertainty and (exchanges := table.total("exchanges")):
        moved = table.total("moved") / exchanges
        if uncertainty > _SHARE * moved:
            notes.append(
                f"clocks are uncertain by {uncertainty / 1e6:.2f} ms and an exchange takes "
                f"{moved / 1e6:.2f} ms: what is waiting and what transfer is vague"
            )
    return notes
