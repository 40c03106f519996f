"""Spans of several ranks that are the same collective, and the rank that came to it last."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lightning_dist.profiling.analysis.clock_quality import uncompared
from lightning_dist.profiling.analysis.intervals import Interval
from lightning_dist.profiling.capture.events import Span
from lightning_dist.profiling.run import Run

Members: TypeAlias = tuple[int, ...]
_Key: TypeAlias = tuple[int, int]  # number of the group in this step, order


@dataclass(frozen=True)
class Exchange:
    """One collective as one rank saw it, in nanoseconds since its step began on this rank.

    Args:
        arrival: launch on the last member, never before ``span.begin``; None: not known.
        last: the member that came last; the lowest of several.
        shortest: the least that it took any member, which no clock can falsify; None: not known.
        missing: members of which there is no record of it.
        collective_id: its number in the step, equal on all members; None: the rank
            does not say which one it is.
        over: end on the last member; None: not known.
    """

    span: Span
    arrival: int | None = None
    last: int | None = None
    shortest: int | None = None
    missing: Members = ()
    collective_id: int | None = None
    over: int | None = None

    @property
    def wait(self) -> Interval:
        """From the launch to that on the last member; empty where that is not known."""
        return self.span.begin, self.transfer[0]

    @property
    def transfer(self) -> Interval:
        """With all members there: it moved, or queued behind others. All of it if not known."""
        since = self.span.begin if self.arrival is None else self.arrival
        return min(since, self.span.end), self.span.end

    @property
    def moving(self) -> Interval:
        """The transfer, and on until the last member is done.

        A rank is done when it has what the others have sent. What it has sent itself may still be
        on its way to them, in buffers of the kernel.
        """
        begin, end = self.transfer
        return begin, end if self.over is None else max(end, self.over)


def begin_of(run: Run, rank: int, step: int) -> int:
    """Begin of a step on a rank, on rank 0's clock.

    One offset serves all of a step, so that its times keep their distances.
    """
    of_rank = run.ranks[rank]
    begin = of_rank.head(step).begin
    return begin + of_rank.offset(begin)


def exchanges_of(run: Run, step: int) -> dict[int, list[Exchange]]:
    """All exchanges of every rank that has recorded the step in detail, in their order.

    The same collective has the same group and order on all its members. Groups of one name are the
    same if their ranks are.
    """
    numbers: dict[tuple[str, Members], int] = {}
    own: dict[int, list[tuple[Span, _Key | None]]] = {}
    together: dict[_Key, dict[int, Span]] = {}
    for rank, each in run.ranks.items():
        if step not in each.steps or not each.head(step).detailed:
            continue
        groups = {
            name: numbers.setdefault((name, tuple(members)), len(numbers))
            for name, members in each.metadata.groups.items()
        }
        own[rank] = []
        for span in each.steps[step].spans:
            if span.phase != "exchange":
                continue
            is_known = span.group in groups and span.order >= 0
            key = (groups[span.group], span.order) if is_known else None
            own[rank].append((span, key))
            if key is not None:
                together.setdefault(key, {})[rank] = span
    begins = {rank: begin_of(run, rank, step) for rank in own}
    members, without_clock = [of for _, of in numbers], uncompared(run)
    seen = {
        key: _collective(number, members[key[0]], spans, begins, without_clock)
        for number, (key, spans) in enumerate(together.items())
    }
    return {
        rank: [Exchange(span) if key is None else seen[key][rank] for span, key in spans]
        for rank, spans in own.items()
    }


def _collective(
    number: int,
    members: Members,
    spans: Mapping[int, Span],
    begins: Mapping[int, int],
    without_clock: Collection[int],
) -> dict[int, Exchange]:
    """One collective as every rank saw it.

    Args:
        begins: of the step, on rank 0's clock.
        without_clock: ranks whose clock was never compared.
    """
    if missing := tuple(rank for rank in members if rank not in spans):
        return {
            rank: Exchange(span, missing=missing, collective_id=number)
            for rank, span in spans.items()
        }
    durations = {rank: span.end - span.begin for rank, span in spans.items()}
    shortest = min(durations.values())
    if len(spans) > 1 and not spans.keys().isdisjoint(without_clock):
        # Without clocks: all leave a collective together, so who took longer has waited.
        last = min(rank for rank, took in durations.items() if took == shortest)
        return {
            rank: Exchange(span, span.end - shortest, last, shortest, collective_id=number)
            for rank, span in spans.items()
        }
    launches = {rank: begins[rank] + span.begin for rank, span in spans.items()}
    arrival = max(launches.values())
    last = min(rank for rank, launch in launches.items() if launch == arrival)
    over = max(begins[rank] + span.end for rank, span in spans.items())
    return {
        rank: Exchange(
            span, arrival - begins[rank], last, shortest, (), number, over - begins[rank]
        )
        for rank, span in spans.items()
    }
