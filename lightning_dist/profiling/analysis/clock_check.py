"""Whether the clocks of the ranks agree well enough for what was made of them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from lightning_dist.profiling.analysis.breakdown import Analysed
from lightning_dist.profiling.analysis.collectives import Exchange, uncompared
from lightning_dist.profiling.analysis.intervals import Interval, length, union
from lightning_dist.profiling.run import RankRun, Run

_SHARE = 0.1
_LEAST = 2e6  # nanoseconds a step


class ClockCheck:
    """The time that exchanges moved, by clocks and without.

    A collective moves for as long as it took the member that came last, which is the least that it
    took any. That needs no comparison of clocks, only that all members leave it together. Where
    members read one clock it can not be wrong, and what differs is when they leave.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._by_clocks = 0
        self._by_durations = 0
        self._exchanges = 0
        self._moved = 0

    def add(self, step: Analysed, *, of_one_clock: Container[str]) -> None:
        """Count a step of one rank, some of whose groups are ``of_one_clock``."""
        self._steps += 1
        doubted = [each for each in step.exchanges if each.span.group not in of_one_clock]
        self._by_clocks += length(union(each.transfer for each in doubted))
        self._by_durations += length(union(map(_by_duration, doubted)))
        self._exchanges += len(step.exchanges)
        self._moved += sum(each.transfer[1] - each.transfer[0] for each in step.exchanges)

    def notes(self, run: Run, steps: Sequence[int]) -> list[str]:
        """What the user should know before trusting waiting and transfer of these steps."""
        notes = []
        if strangers := uncompared(run):
            ranks = ", ".join(map(str, strangers))
            notes.append(
                f"no clock of rank {ranks} was compared with rank 0's: who waited follows from how "
                "long exchanges took"
            )
        by_clocks, by_durations = self._by_clocks, self._by_durations
        gap = abs(by_clocks - by_durations)
        if gap > _SHARE * max(by_clocks, by_durations) and gap > _LEAST * self._steps:
            notes.append(
                f"transfer between hosts is {by_clocks / self._steps / 1e6:.1f} ms a step by "
                f"clocks and {by_durations / self._steps / 1e6:.1f} ms by durations: clocks may be "
                "wrong, trust the latter"
            )
        uncertainty = max(uncertainty_of(each, steps) or 0 for each in run.ranks.values())
        if uncertainty and self._exchanges:
            moved = self._moved / self._exchanges
            if uncertainty > _SHARE * moved:
                notes.append(
                    f"clocks are uncertain by {uncertainty / 1e6:.2f} ms and an exchange takes "
                    f"{moved / 1e6:.2f} ms: what is waiting and what transfer is vague"
                )
        return notes


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


def _by_duration(exchange: Exchange) -> Interval:
    # The root of a broadcast leaves it before the others have it: its duration says nothing.
    if exchange.shortest is None or exchange.span.op == "broadcast":
        return exchange.transfer
    return exchange.span.end - exchange.shortest, exchange.span.end
