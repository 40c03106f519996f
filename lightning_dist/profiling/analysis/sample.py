"""Which steps a summary is of."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_dist.profiling.analysis.parts import Unavailable
from lightning_dist.profiling.analysis.tables import MS, mean
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
        warmup_steps: how many first steps were left out.
        reason: why ``detailed`` is empty: it stands wherever a figure is missing.
        advice: where no rank has a step, why, and what to do about it.
        notes: what was left out, for the user to see.
        cut: how many of how many steps all ranks have, where one ends much earlier than another.
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
        """For the one place that says all."""
        return ": ".join(filter(None, (self.reason, self.advice)))

    def durations_ms(self) -> list[float]:
        """Of every step, the mean over ranks."""
        ranks = self.ranks.values()
        return [mean([each.head(step).duration / MS for each in ranks]) for step in self.steps]


def sample(run: Run, *, warmup_steps: int) -> Sample:
    """Choose them.

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
    recorded = set().union(*(each.steps for each in ranks.values()))
    everything, cut = len(recorded), None
    if common and _missing_at_the_end(ranks, recorded) > _LEAST_MISSING * everything:
        cut = len(common), everything
    if len(common) < everything:
        notes.append(f"{len(common)} of {everything} steps are of all ranks; only these count")
    left_out = warmup_steps if len(common) > warmup_steps else 0
    if common and left_out < warmup_steps:
        notes.append(
            f"with only {_steps(len(common))} the first are not left out, in which DDP still "
            "builds its buckets"
        )
    steps = common[left_out:]
    detailed = [step for step in steps if all(each.head(step).detailed for each in ranks.values())]
    reason: Unavailable | None = None
    if 0 < len(detailed) < len(steps):
        notes.append(
            f"parts and communication are of the {_steps(len(detailed))} of {len(steps)} that were "
            "looked at in detail; step times are of all"
        )
    if not detailed:
        without = Unavailable.NO_DETAIL if steps else Unavailable.NO_COMMON_STEP
        reason = without if everything else Unavailable.NO_STEP
    elif (most := _most(ranks, detailed[-1])) < len(detailed):
        notes.append(
            f"communication is of {most} of {len(detailed)} steps, spread evenly; step times are "
            "of all"
        )
        detailed = spread(detailed, most)
    advice = "" if everything else _why_no_step(run)
    return Sample(ranks, steps, detailed, left_out, reason, notes, cut, advice)


def _missing_at_the_end(ranks: Mapping[int, RankRun], recorded: Iterable[int]) -> int:
    """Steps after the last one of the rank that ends first."""
    end = min(max(each.steps) for each in ranks.values())
    return sum(step > end for step in recorded)


def _why_no_step(run: Run) -> Unavailable:
    """What ended a training is told by a note."""
    endings = {each.end.reason for each in run.ranks.values() if each.end is not None}
    if not endings:
        return Unavailable.KILLED
    return Unavailable.NO_OPTIMIZER_STEP if endings == {"finished"} else Unavailable.ENDED


def _most(ranks: Mapping[int, RankRun], step: int) -> int:
    spans = sum(len(each.steps[step].spans) for each in ranks.values())
    return min(MOST, max(_FEWEST, _SPANS // max(spans, 1)))


def spread(steps: Sequence[int], most: int) -> list[int]:
    """One of every stretch, at random: whatever happens every n-th step has its share.

    The same for the same steps.
    """
    if len(steps) <= most:
        return list(steps)
    rng = random.Random(0)
    edges = [math.floor(len(steps) * i / most) for i in range(most + 1)]
    return [steps[rng.randrange(edges[i], edges[i + 1])] for i in range(most)]


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
