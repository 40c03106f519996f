"""Offset of a clock between and beyond its readings, and how uncertain that is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from lightning_dist.profiling.capture.events import ClockRecord

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
