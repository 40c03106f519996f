"""Steps that a summary is of."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dist.profiling.analysis.metrics import count
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
        warmup_steps: number of first steps that were left out.
        reason: why ``detailed`` is empty: it stands wherever a figure is missing.
        notes: what was left out, for the user to see.
        cut: such as ``"9 of 40 steps"``, where a rank ends much earlier than another.
    """

    ranks: Mapping[int, RankRun]
    steps: Sequence[int]
    detailed: Sequence[int]
    warmup_steps: int
    reason: str
    notes: Sequence[str]
    cut: str = ""

    def durations_ms(self) -> list[float]:
        """Duration of every step, the mean over ranks."""
        ranks = self.ranks.values()
        return [mean([each.head(step).duration for each in ranks]) / MS for step in self.steps]


def sample(run: Run, *, warmup_steps: int) -> Sample:
    """The steps that count, and those of them to look at in detail.

    Raises:
        ValueError: ``warmup_steps`` is negative.
    """
    if warmup_steps < 0:
        raise ValueError(
            f"warmup_steps must not be negative, it is {warmup_steps}; 0 counts all steps"
        )
    ranks = {rank: each for rank, each in run.ranks.items() if each.steps}
    common = Run(ranks).common_steps
    recorded = set[int]().union(*(each.steps for each in ranks.values()))
    left_out = warmup_steps if len(common) > warmup_steps else 0
    steps = common[left_out:]
    detailed = [step for step in steps if all(each.head(step).detailed for each in ranks.values())]
    spans = sum(len(each.steps[step].spans) for each in ranks.values() for step in detailed[-1:])
    most = min(MOST, max(_FEWEST, _SPANS // max(spans, 1)))
    of_all = f"{len(common)} of {len(recorded)} steps"
    end = min((max(each.steps) for each in ranks.values()), default=0)
    lost = sum(step > end for step in recorded) if common else 0
    notes = (
        (len(common) < len(recorded), f"{of_all} are of all ranks; only these count"),
        (
            len(common) > 0 and left_out < warmup_steps,
            f"with only {count(len(common), 'step')} the first are not left out, in which DDP "
            "still builds its buckets",
        ),
        (
            0 < len(detailed) < len(steps),
            f"parts and communication are of the {count(len(detailed), 'step')} of {len(steps)} "
            "that were looked at in detail; step times are of all",
        ),
        (
            len(detailed) > most,
            f"communication is of {most} of {len(detailed)} steps, spread evenly; step times are "
            "of all",
        ),
    )
    reasons = (
        (bool(detailed), ""),
        (bool(steps), "no step is recorded in detail on all ranks"),
        (bool(recorded), "no step is recorded on all ranks"),
        (True, "no rank has recorded a step"),
    )
    return Sample(
        ranks,
        steps,
        spread(detailed, most),
        left_out,
        reason=next(reason for holds, reason in reasons if holds),
        notes=[note for holds, note in notes if holds],
        cut=of_all if lost > _LEAST_MISSING * len(recorded) else "",
    )


def spread(steps: Sequence[int], most: int) -> list[int]:
    """One of every stretch, at random: whatever happens every n-th step has its share.

    The same for the same steps.
    """
    if len(steps) <= most:
        return list(steps)
    rng = random.Random(0)
    edges = [math.floor(len(steps) * i / most) for i in range(most + 1)]
    return [steps[rng.randrange(edges[i], edges[i + 1])] for i in range(most)]
