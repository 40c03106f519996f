"""Whether the clocks of the ranks agree well enough for what was made of them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from lightning_dist.profiling.breakdown import Analysed
from lightning_dist.profiling.collectives import Exchange, uncompared
from lightning_dist.profiling.folder import RankRun, Run
from lightning_dist.profiling.intervals import Interval, length, union

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

    def notes(self, run: Run) -> list[str]:
        """What the user should know before trusting waiting and transfer."""
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
        uncertainty = max(map(uncertainty_of, run.ranks.values()), key=lambda each: each or 0)
        if uncertainty and self._exchanges:
            moved = self._moved / self._exchanges
            if uncertainty > _SHARE * moved:
                notes.append(
                    f"clocks are uncertain by {uncertainty / 1e6:.2f} ms and an exchange takes "
                    f"{moved / 1e6:.2f} ms: what is waiting and what transfer is vague"
                )
        return notes


def uncertainty_of(rank: RankRun) -> int | None:
    """Of its clock against rank 0's at the worst reading, in nanoseconds; None: never compared."""
    readings: Sequence[int] = [each.uncertainty for each in rank.clocks]
    return max(readings, default=None)


def _by_duration(exchange: Exchange) -> Interval:
    # The root of a broadcast leaves it before the others have it: its duration says nothing.
    if exchange.shortest is None or exchange.span.op == "broadcast":
        return exchange.transfer
    return exchange.span.end - exchange.shortest, exchange.span.end
