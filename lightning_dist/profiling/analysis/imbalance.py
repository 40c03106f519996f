"""Ranks that are late, phases in which ranks differ, and residuals that grow without end."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

import numpy as np

from lightning_dist.profiling.analysis.metrics import format_value
from lightning_dist.profiling.analysis.parts import PhaseSkew
from lightning_dist.profiling.analysis.tables import MS, Array, StepTable
from lightning_dist.profiling.capture.events import ErrorRecord

SHARE = 2 / 3
"""Share of the waiting that is for a rank which is clearly the last: twice that for all others."""

_LEAST_WAITING = 0.02
"""Share of the step below which waiting is too little to name a rank."""

_DEVIATIONS = 2
"""Standard deviations by which something is more than chance would give."""

_ORDER = ("optimizer", "between_steps", "forward", "backward")
"""Phases as they come after an exchange, which ranks leave together: who is late in one is waited
for in another that comes later."""

_LEAST_UNEVEN = 0.1
"""Share of the step up to which ranks are as good as even."""

_EXPLAINED = 0.5
"""Share of a difference; where so much of it is waiting in exchanges, that is all there is."""


def straggler(table: StepTable, phase_skew: Sequence[PhaseSkew]) -> tuple[int | None, str]:
    """The rank that others wait for, or why it is not clearly one; no reason if nobody waits."""
    late = table.of("late")
    total, duration = late.sum(axis=0), table.total("duration")
    if not total.any():
        return None, ""
    row, waiting = int(total.argmax()), total.sum()  # of several the lowest
    if waiting < _LEAST_WAITING * duration:
        return None, f"waiting is {format_value(waiting / duration, '%')} of the step"
    rank, waiters = table.ranks[row], max(len(table.ranks) - 1, 1)
    if (share := total[row] / waiting) < SHARE:
        doubt = f"only {format_value(share, '%')} of the waiting is for rank {rank}"
    elif total[row] <= table.of("uncertainty").max(axis=1).sum() * waiters:
        doubt = f"the clock uncertainty is as large as the delay of rank {rank}"
    # If it were a matter of chance, each step could as well have been the other way round.
    elif may_be_chance(2 * late[:, row] - late.sum(axis=1)):
        doubt = f"rank {rank} was late in too few steps to rule out chance"
    # It may be late in exchanges only because it has waited before them.
    elif any(not waits_explain(table, row, skew.excess_ms) for skew in phase_skew):
        return None, "ranks differ more outside exchanges"
    else:
        return rank, ""
    return None, f"no rank is clearly the last: {doubt}"


def may_be_chance(leads: Array) -> bool:
    """Values of steps may add up to this though each is as likely above zero as below."""
    return bool(leads.sum() ** 2 < _DEVIATIONS**2 * (leads**2).sum())


def find_phase_skew(table: StepTable) -> list[PhaseSkew]:
    """Phases in which ranks differ without waiting for each other in exchanges of gradients.

    Ranks make their steps together: what one of them takes longer the others spend elsewhere. Where
    that is not in an exchange, they may wait in a collective that the profiler does not see. None
    where waiting is not known.
    """
    if table.unknown_wait or not table.total("exchange"):
        return []
    waited = table.of("waited").sum(axis=0) / len(table.steps) / MS
    skews = []
    for phase in _ORDER:
        lengths = table.of(phase)
        ms = lengths.sum(axis=0) / len(table.steps) / MS
        by_length = np.argsort(-ms, kind="stable").tolist()
        longest, shortest = by_length[0], int(ms.argmin())
        excess = float(ms[longest] - ms[shortest])
        is_even = excess <= _LEAST_UNEVEN * table.mean_ms("duration")
        # Ranks wait for the longest in exchanges, or the shortest for one that has waited for it.
        is_explained = (
            waits_explain(table, longest, excess)
            or waited[shortest] - waited[longest] >= _EXPLAINED * excess
        )
        if is_even or is_explained or may_be_chance(lengths[:, longest] - lengths[:, shortest]):
            continue
        ranks = [table.ranks[row] for row in by_length if ms[row] - ms[shortest] > excess / 2]
        skews.append(PhaseSkew(phase, ranks, table.ranks[shortest], excess))
    return skews


def waits_explain(table: StepTable, row: int, excess_ms: float) -> bool:
    """Others wait in exchanges for the rank in this row, for most of ``excess_ms`` a step."""
    longest = table.waited_for[:, row].max() / max(len(table.steps), 1)
    return bool(longest / MS >= _EXPLAINED * excess_ms)


_RECENT = 5
_FEWEST = 2 * _RECENT
_MOST = 200
"""Newest samples of a bucket that are compared."""
_TIMES = 3.0
_LEAST_RATIO = 10.0
"""A residual that is smaller, in gradients, arrives soon enough, however it has grown."""


@dataclass(frozen=True)
class Growth:
    """Growth of the residual of a bucket, from ``before`` to ``now`` times its gradient."""

    bucket: int
    step: int
    before: float
    now: float

    def __str__(self) -> str:
        return (
            f"the residual of bucket {self.bucket} has grown from {self.before:.3g} to "
            f"{self.now:.3g} times its gradient (step {self.step}): error feedback does not "
            "compensate what the codec drops. Use a codec or options that lose less (a larger "
            "ratio or rank, int8), or a smaller learning rate"
        )


class ResidualAlarm:
    """Compares the newest residuals of a bucket with those of before.

    A residual fills while training begins: the first quarter of the samples of a bucket counts for
    nothing, the second is what was before.
    """

    def __init__(self) -> None:
        self._ratios: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_MOST))

    def add(self, error: ErrorRecord) -> Growth | None:
        """The growth up to this sample, if it is alarming."""
        if error.residual_ratio is None:
            return None
        ratios = self._ratios[error.bucket]
        ratios.append(error.residual_ratio)
        count = len(ratios)
        if count < _FEWEST:
            return None
        now = median(islice(ratios, count - _RECENT, None))
        before = median(islice(ratios, count // 4, count // 2))
        if now <= max(_TIMES * before, _LEAST_RATIO):
            return None
        return Growth(error.bucket, error.step, before, now)


def growth_of(errors: Iterable[ErrorRecord]) -> Growth | None:
    """The largest growth in the samples of a rank, in their order."""
    alarm = ResidualAlarm()
    growths = [growth for error in errors if (growth := alarm.add(error)) is not None]
    return max(growths, key=lambda growth: growth.now, default=None)
