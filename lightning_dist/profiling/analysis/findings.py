"""What comes of looking at steps span by span."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field, replace

from lightning_dist.profiling.analysis.breakdown import analyse, unknown_wait
from lightning_dist.profiling.analysis.clock_check import ClockCheck
from lightning_dist.profiling.analysis.collectives import groups_of_one_clock
from lightning_dist.profiling.analysis.parts import EXPOSED, PARTS, Series
from lightning_dist.profiling.analysis.sample import Sample
from lightning_dist.profiling.analysis.stragglers import Waits
from lightning_dist.profiling.analysis.totals import (
    MS,
    BucketTotals,
    RankTotals,
    Reach,
    add_buckets,
    mean,
    moving_of_hosts,
    slowest,
)
from lightning_dist.profiling.capture.events import PHASES
from lightning_dist.profiling.run import Run


@dataclass
class Findings:
    """Sums by rank and by bucket, and what was seen on the way.

    Args:
        unknown_wait: why waiting is not, or not wholly, known.
        waits: hidden or not.
        exposed_waits: what of them is exposed.
        series: of the steps that were looked at.
        phases: nanoseconds of each, by rank, in every step that was looked at.
        moving_of_hosts: nanoseconds in which any rank of a host exchanged with other hosts.
    """

    ranks: dict[int, RankTotals]
    buckets: dict[int, BucketTotals] = field(default_factory=dict)
    clocks: ClockCheck = field(default_factory=ClockCheck)
    unknown_wait: str = ""
    waits: Waits = field(default_factory=Waits)
    exposed_waits: Waits = field(default_factory=Waits)
    series: Series = field(
        default_factory=lambda: Series([], [], {name: [] for name in PARTS}, {}, [])
    )
    phases: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    moving_of_hosts: Counter[str] = field(default_factory=Counter)

    @property
    def steps(self) -> int:
        """Every rank counts its own."""
        return sum(each.steps for each in self.ranks.values())

    @property
    def duration_ms(self) -> float:
        """The mean of these steps."""
        total = sum(each.duration for each in self.ranks.values())
        return total / max(self.steps, 1) / MS

    @property
    def is_blind(self) -> bool:
        """Whether steps were looked at, and nothing of communication was seen."""
        moved = any(each.union for each in self.ranks.values())
        return self.steps > 0 and not self.buckets and not moved

    def forget_exposed(self) -> None:
        """Nothing is known of it, and it is not zero."""
        parts = {name: of for name, of in self.series.parts_ms.items() if name not in EXPOSED}
        self.series = replace(self.series, parts_ms=parts, wait_ms={})

    def leave_out(self, names: Container[str]) -> None:
        """Of parts that are zero and in ``names``: they were not measured."""
        parts = {
            name: values
            for name, values in self.series.parts_ms.items()
            if name not in names or any(values)
        }
        wait_ms = self.series.wait_ms
        if "wait" in names and not any(map(any, wait_ms.values())):
            wait_ms = {}
        self.series = replace(self.series, parts_ms=parts, wait_ms=wait_ms)

    def parts_ms(self) -> dict[str, float]:
        """The mean of every part that is known."""
        known = self.series.parts_ms
        sums = {name: sum(each.parts[name] for each in self.ranks.values()) for name in known}
        return {name: total / self.steps / MS for name, total in sums.items()}


def look(run: Run, chosen: Sample) -> Findings:
    """Go through the detailed steps of ``chosen``."""
    found = Findings({rank: RankTotals() for rank in chosen.ranks})
    found.phases = {name: {rank: [] for rank in chosen.ranks} for name in PHASES}
    reach = {rank: Reach.of(run, each.about) for rank, each in chosen.ranks.items()}
    of_one_clock = groups_of_one_clock(run)
    step_ms: list[float] = []
    slowest_of: list[int | None] = []
    parts_ms: dict[str, list[float]] = {name: [] for name in PARTS}
    wait_ms: dict[int, list[float]] = {rank: [] for rank in chosen.ranks}
    for step in chosen.detailed:
        of_ranks = analyse(run, step)
        found.moving_of_hosts.update(moving_of_hosts(run, of_ranks, reach))
        for each in of_ranks:
            found.ranks[each.parts.rank].add(each, reach[each.parts.rank])
            found.clocks.add(each, of_one_clock=of_one_clock[each.parts.rank])
            add_buckets(found.buckets, each)
            wait_ms[each.parts.rank].append(sum(each.parts.waited_for.values()) / MS)
            for name, lengths in found.phases.items():
                lengths[each.parts.rank].append(each.parts.parts[name])
        found.unknown_wait = found.unknown_wait or unknown_wait(of_ranks)
        found.waits.add([each.parts.waited_for for each in of_ranks])
        found.exposed_waits.add([each.parts.exposed_for for each in of_ranks])
        step_ms.append(mean([each.parts.duration / MS for each in of_ranks]))
        slowest_of.append(slowest(each.parts for each in of_ranks))
        for name, values in parts_ms.items():
            values.append(mean([each.parts.parts[name] / MS for each in of_ranks]))
    found.series = Series(chosen.detailed, step_ms, parts_ms, wait_ms, slowest_of)
    return found
