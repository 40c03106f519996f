"""Which rank the others wait for, if it is clearly one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SHARE = 2 / 3
"""Of the waiting, that is for a rank which is clearly the last: twice that for all others."""

_DEVIATIONS = 2
"""By so many standard deviations more than chance would give."""


@dataclass
class Waits:
    """Nanoseconds of waiting, of all ranks together, by the rank that it was for, in each step."""

    steps: list[Counter[int]] = field(default_factory=list)

    def add(self, of_ranks: list[Mapping[int, int]]) -> None:
        """Count a step: of every rank that has waited, for whom."""
        self.steps.append(sum(map(Counter, of_ranks), Counter[int]()))

    @property
    def total(self) -> Counter[int]:
        """Of all steps."""
        return sum(self.steps, Counter[int]())

    def most(self) -> int | None:
        """The rank that most waiting was for, the lowest of several; None: nobody waited."""
        total = self.total
        return max(total, key=lambda rank: (total[rank], -rank), default=None)

    def why_not(self, rank: int, *, uncertainty: int, waiters: int) -> str:
        """Why ``rank`` is not clearly the last; empty if it is.

        Args:
            uncertainty: of the clocks, nanoseconds.
            waiters: ranks that can wait for it.
        """
        total = self.total
        share = total[rank] / total.total()
        if share < SHARE:
            return f"only {share:.0%} of it is for rank {rank}, the most"
        if total[rank] <= uncertainty * waiters * len(self.steps):
            return f"clocks are no more certain than what rank {rank} was late"
        # If it were a matter of chance, each step could as well have been the other way round.
        leads = [2 * step[rank] - step.total() for step in self.steps]
        if may_be_chance(leads):
            return f"rank {rank} was late in too few steps to tell it from chance"
        return ""


def may_be_chance(leads: Sequence[float]) -> bool:
    """Whether values of steps may add up to this though each is as likely above zero as below."""
    return sum(leads) ** 2 < _DEVIATIONS**2 * sum(lead**2 for lead in leads)
