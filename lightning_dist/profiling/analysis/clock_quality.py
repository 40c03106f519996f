"""Offsets between the clocks of ranks, and their uncertainty."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_dist.profiling.capture.events import ClockRecord

if TYPE_CHECKING:  # which reads clocks with this module
    from lightning_dist.profiling.run import Run

DRIFT = 1e-4
"""Most by which two clocks part: quartz is specified to be off by 50 in a million."""

_WANDER = 1e-6
"""By about so much the rate of a quartz changes with its temperature within hours."""


def clock_at(readings: Sequence[ClockRecord], at: int) -> ClockRecord:
    """Offset and uncertainty of a clock when it shows ``at``, from its ``readings`` in order.

    Between two readings it drifts evenly, and before the first and after the last one as it did
    between the nearest two. Where these are too close to tell the drift, or there is only one, the
    offset stays. The uncertainty grows with the time to the nearest reading, by what is not known
    of the drift.
    """
    after = min(max(bisect_right(readings, at, key=lambda each: each.at), 1), len(readings) - 1)
    left, right = readings[max(after - 1, 0)], readings[after]
    nearest = left if at - left.at < right.at - at else right
    apart, away = right.at - left.at, at - nearest.at
    drift = (right.offset - left.offset) / apart if apart else 0.0
    # Bound of the error of the drift beyond these two.
    drift_error = (left.uncertainty + right.uncertainty) / apart + _WANDER if apart else DRIFT
    if left.at <= at <= right.at:
        widening = (right.uncertainty - left.uncertainty) / apart if apart else 0.0
        uncertainty = nearest.uncertainty + away * widening + _WANDER * abs(away)
    else:
        drift = drift if drift_error < DRIFT else 0.0
        uncertainty = nearest.uncertainty + abs(away) * min(drift_error, DRIFT)
    if not any(each.uncertainty for each in readings):
        uncertainty = 0.0  # rank 0's own clock, which does not drift from itself
    return ClockRecord(at, nearest.offset + round(away * drift), round(uncertainty))


def clock_of(run: Run, rank: int) -> tuple[int, int] | None:
    """Identity of the clock of a rank, equal on ranks that read the same one.

    None: it is on another host than rank 0, and was never compared with its clock.
    """
    of_rank = run.ranks[rank]
    if of_rank.clocks:
        first = of_rank.clocks[0]
        return first.offset, first.uncertainty
    is_reference = 0 in run.ranks and of_rank.metadata.host == run.ranks[0].metadata.host
    return (0, 0) if is_reference else None
