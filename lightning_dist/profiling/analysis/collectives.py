"""Which spans of several ranks are the same collective, and who came to it last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_dist.profiling.analysis.intervals import Interval
from lightning_dist.profiling.capture.events import Span, StepRecord
from lightning_dist.profiling.run import Run

Members: TypeAlias = tuple[int, ...]
_Key: TypeAlias = tuple[int, int]  # number of the group in this step, order


@dataclass(frozen=True)
class Exchange:
    """One collective as one rank saw it, in nanoseconds since its step began on this rank.

    Args:
        arrival: when the last member had come, never before ``span.begin``; None: not known.
        last: the member that came last; the lowest of several.
        shortest: the least that it took any member, which no clock can falsify; None: not known.
        missing: members of which there is no record of it.
        meeting: its number among the collectives of the step, equal on all members; None: the rank
            does not say which one it is.
        over: when the last member was done; None: not known.
    """

    span: Span
    arrival: int | None = None
    last: int | None = None
    shortest: int | None = None
    missing: Members = ()
    meeting: int | None = None
    over: int | None = None

    @property
    def wait(self) -> Interval:
        """The members were not all there. Empty where that is not known."""
        until = self.span.begin if self.arrival is None else self.arrival
        return self.span.begin, min(until, self.span.end)

    @property
    def transfer(self) -> Interval:
        """They all were: it moved, or queued behind others. Where that is not known, all of it."""
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
    """When a rank began a step, on rank 0's clock.

    One offset serves all of a step, so that its times keep their distances.
    """
    of_rank = run.ranks[rank]
    begin = of_rank.head(step).begin
    return begin + of_rank.offset(begin)


def uncompared(run: Run) -> list[int]:
    """Ranks whose clock has nothing to do with rank 0's: another host, and never compared."""
    host = run.ranks[0].about.host if 0 in run.ranks else None
    return [
        rank
        for rank, each in run.ranks.items()
        if rank != 0 and not each.clocks and each.about.host != host
    ]


def groups_of_one_clock(run: Run) -> dict[int, frozenset[str]]:
    """Of every rank those groups whose members all read the same clock."""
    clocks = {rank: _clock_of(run, rank) for rank in run.ranks}
    return {
        rank: frozenset(
            name
            for name, members in each.about.groups.items()
            if len({clocks.get(member) for member in members}) == 1
        )
        for rank, each in run.ranks.items()
    }


def _clock_of(run: Run, rank: int) -> tuple[int, int] | str:
    """The same for ranks of one machine, where one compares the clocks for all."""
    of_rank = run.ranks[rank]
    if not of_rank.clocks:
        return of_rank.about.host
    first = of_rank.clocks[0]
    if first.uncertainty == 0 and 0 in run.ranks:  # rank 0's own
        return run.ranks[0].about.host
    return first.offset, first.uncertainty


def exchanges_of(run: Run, step: int) -> dict[int, list[Exchange]]:
    """All exchanges of every rank that has recorded the step in detail, in their order."""
    records = {
        rank: each.steps[step]
        for rank, each in run.ranks.items()
        if step in each.steps and each.head(step).detailed
    }
    begins = {rank: begin_of(run, rank, step) for rank in records}
    groups = _Groups(run)
    seen: dict[_Key, dict[int, Span]] = {}
    for rank, record in records.items():
        for span in record.spans:
            if (key := groups.key(rank, span)) is not None:
                seen.setdefault(key, {})[rank] = span
    strangers = set(uncompared(run))
    meetings = {
        key: _Meeting.of(number, spans, begins, members=groups.members[key[0]], strangers=strangers)
        for number, (key, spans) in enumerate(seen.items())
    }
    return {
        rank: _of_rank(rank, record, begins[rank], groups, meetings)
        for rank, record in records.items()
    }


def _of_rank(
    rank: int,
    record: StepRecord,
    begin: int,
    groups: _Groups,
    meetings: Mapping[_Key, _Meeting],
) -> list[Exchange]:
    found = []
    for span in record.spans:
        if span.phase == "exchange":
            key = groups.key(rank, span)
            found.append(Exchange(span) if key is None else meetings[key].seen_by(span, begin))
    return found


class _Groups:
    """The groups of all ranks by number: two with one name are the same if their ranks are."""

    def __init__(self, run: Run) -> None:
        numbers: dict[tuple[str, Members], int] = {}
        self._of_rank = {
            rank: {
                name: numbers.setdefault((name, tuple(ranks)), len(numbers))
                for name, ranks in each.about.groups.items()
            }
            for rank, each in run.ranks.items()
        }
        self.members = [members for _, members in numbers]

    def key(self, rank: int, span: Span) -> _Key | None:
        """What all members call this exchange; None: it is none, or does not say."""
        if span.phase != "exchange" or span.order < 0:
            return None
        number = self._of_rank[rank].get(span.group)
        return None if number is None else (number, span.order)


@dataclass(frozen=True)
class _Meeting:
    """A collective of all its members.

    ``arrival`` and ``over`` are on rank 0's clock; None: clocks do not say.
    """

    number: int
    missing: Members
    arrival: int | None = None
    last: int | None = None
    shortest: int | None = None
    over: int | None = None

    @classmethod
    def of(
        cls,
        number: int,
        spans: Mapping[int, Span],
        begins: Mapping[int, int],
        *,
        members: Sequence[int],
        strangers: set[int],
    ) -> _Meeting:
        if missing := tuple(rank for rank in members if rank not in spans):
            return cls(number, missing)
        durations = {rank: span.end - span.begin for rank, span in spans.items()}
        shortest = min(durations.values())
        if strangers.intersection(spans) and len(spans) > 1:
            last = min(rank for rank, took in durations.items() if took == shortest)
            return cls(number, (), None, last, shortest)
        launches = {rank: begins[rank] + span.begin for rank, span in spans.items()}
        arrival = max(launches.values())
        last = min(rank for rank, launch in launches.items() if launch == arrival)
        over = max(begins[rank] + span.end for rank, span in spans.items())
        return cls(number, (), arrival, last, shortest, over)

    def seen_by(self, span: Span, begin: int) -> Exchange:
        if self.missing:
            return Exchange(span, missing=self.missing, meeting=self.number)
        assert self.shortest is not None
        # Without clocks: all leave a collective together, so who took longer has waited.
        arrival = span.end - self.shortest if self.arrival is None else self.arrival - begin
        over = None if self.over is None else self.over - begin
        return Exchange(span, arrival, self.last, self.shortest, meeting=self.number, over=over)
