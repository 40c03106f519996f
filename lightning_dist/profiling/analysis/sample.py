"""Steps that a summary is of."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dist.profiling.analysis.metrics import count
from lightning_dist.profiling.analysis.tables import MS, mean
from lightning_dist.profiling.analysis.unavailable import Unavailable
from lightning_dist.profiling.run import RankRun, Run

MOST = 500
"""Steps that are looked at span by span: minutes become seconds, and means stay means."""

_LEAST_MISSING = 0.05
"""Share of the steps up to which the end of a rank changes nothing: a killed one loses a second."""

_FEWEST = 50
_SPANS = 500_000


@dataclass(frozen=True)
class Sample:
    """Steps of a run, in order.

    Args:
        ranks: that have recorded any step.
        steps: that all of these have recorded, without the first.
        detailed: those of them to look at span by span.
        warmup_steps: number of first steps that were left out.
        reason: why ``detailed`` is empty: it stands wherever a figure is missing.
        notes: what was left out, for the user to see.
        cut: how many of how many steps all ranks have, where one ends much earlier than another.
        advice: where no rank has a step, why, and what to do about it.
    """

    ranks: Mapping[int, RankRun]
    steps: Sequence[int]
    detailed: Sequence[int]
    warmup_steps: int
    reason: Unavailable | None
    notes: Sequence[str]
    cut: tuple[int, int] | None = None
    advice: str = ""

    @property
    def whole_reason(self) -> str:
        """``reason`` with the advice, for the one place that says all."""
        return ": ".join(filter(None, (self.reason, self.advice)))

    def durations_ms(self) -> list[float]:
        """Duration of every step, the mean over ranks."""
        ranks = self.ranks.values()
        return [mean([each.head(step).duration / MS for each in ranks]) for step in self.steps]


def sample(run: Run, *, warmup_steps: int) -> Sample:
    """The steps that count, and those of them to look at in detail.

    Raises:
        ValueError: ``warmup_steps`` is negative.
    """
    if warmup_steps < 0:
        raise ValueError(
            f"warmup_steps must not be negative, it is {warmup_steps}; 0 counts all steps"
        )
    notes: list[str] = []
    ranks = {rank: each for rank, each in run.ranks.items() if each.steps}
    common = Run(ranks).common_steps
    recorded = set[int]().union(*(each.steps for each in ranks.values()))
    everything, cut = len(recorded), None
    if common:
        end = min(max(each.steps) for each in ranks.values())
        if sum(step > end for step in recorded) > _LEAST_MISSING * everything:
            cut = len(common), everything
    if len(common) < everything:
        notes.append(f"{len(common)} of {everything} steps are of all ranks; only these count")
    left_out = warmup_steps if len(common) > warmup_steps else 0
    if common and left_out < warmup_steps:
        notes.append(
            f"with only {count(len(common), 'step')} the first are not left out, in which DDP "
            "still builds its buckets"
        )
    steps = common[left_out:]
    detailed = [step for step in steps if all(each.head(step).detailed for each in ranks.values())]
    if 0 < len(detailed) < len(steps):
        notes.append(
            f"parts and communication are of the {count(len(detailed), 'step')} of {len(steps)} "
            "that were looked at in detail; step times are of all"
        )
    if detailed:
        spans = sum(len(each.steps[detailed[-1]].spans) for each in ranks.values())
        most = min(MOST, max(_FEWEST, _SPANS // max(spans, 1)))
        if most < len(detailed):
            notes.append(
                f"communication is of {most} of {len(detailed)} steps, spread evenly; step times "
                "are of all"
            )
        return Sample(ranks, steps, spread(detailed, most), left_out, None, notes, cut)
    if everything:
        reason = Unavailable.NO_DETAIL if steps else Unavailable.NO_COMMON_STEP
        return Sample(ranks, steps, [], left_out, reason, notes, cut)
    # The error or signal that ended a training is in a note.
    endings = {each.end.reason for each in run.ranks.values() if each.end is not None}
    finished = Unavailable.NO_OPTIMIZER_STEP if endings == {"finished"} else Unavailable.ENDED
    advice = finished if endings else Unavailable.KILLED
    return Sample(ranks, [], [], left_out, Unavailable.NO_STEP, notes, advice=advice)


def spread(steps: Sequence[int], most: int) -> list[int]:
    """One of every stretch, at random: whatever happens every n-th step has its share.

    The same for the same steps.
    """
    if len(steps) <= most:
        return list(steps)
    rng = random.Random(0)
    edges = [math.floor(len(steps) * i / most) for i in range(most + 1)]
    return [steps[rng.randrange(edges[i], edges[i + 1])] for i in range(most)]
