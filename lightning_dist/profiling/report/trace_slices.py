"""What a trace shows of one step, before it has threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lightning_dist.profiling.analysis.intervals import Intervals, difference
from lightning_dist.profiling.analysis.parts import Placed, Timeline
from lightning_dist.profiling.report.trace_exchanges import (
    Collective,
    collectives,
    mbit_per_s,
    moves_from,
    rates,
)

Event: TypeAlias = dict[str, Any]

EXPOSED = "exposed communication"
"""From the last gradient to the mean of all, in every backward pass."""

TRACKS = ("step", "phases", "codec", "exchange")
"""Kinds of slices of a rank, in the order in which they are drawn."""


@dataclass(frozen=True)
class Clock:
    """From nanoseconds of a step to microseconds of the trace, where it begins ``shift`` later.

    Whole ones: viewers multiply fractions by 1000 and cut, and slices that touch would overlap.
    """

    shift: int

    def __call__(self, time: int) -> int:
        return round((time + self.shift) / 1000)


@dataclass(frozen=True)
class Slice:
    """A bar of one rank, in microseconds.

    Args:
        inside: slices that it encloses, instants, and ends of arrows.
    """

    rank: int
    track: str
    name: str
    begin: int
    end: int
    args: Mapping[str, Any] = field(default_factory=dict)
    inside: Sequence[Event] = ()

    def events(self) -> Iterator[Event]:
        """The slice itself, and what is inside."""
        yield complete(self.name, self.track, begin=self.begin, end=self.end, args=self.args)
        yield from self.inside


def complete(
    name: str, category: str, *, begin: int, end: int, args: Mapping[str, Any] | None = None
) -> Event:
    """The event of a slice."""
    event = {"name": name, "cat": category, "ph": "X", "ts": begin, "dur": end - begin}
    return {**event, "args": dict(args)} if args else event


def slices_of(timeline: Timeline, clock: Clock) -> Iterator[Slice]:
    """All of one step."""
    yield from _phases(timeline, clock)
    for rank, spans in timeline.spans.items():
        for span in spans:
            if span.phase != "exchange":
                name, times = f"{span.phase} {span.bucket}", (clock(span.begin), clock(span.end))
                yield Slice(rank, "codec", name, *times, {"bucket": span.bucket})
    for number, collective in enumerate(collectives(timeline)):
        yield from _exchange(collective, clock, f"{timeline.step}.{number}")


def _phases(timeline: Timeline, clock: Clock) -> Iterator[Slice]:
    for rank, phases in timeline.phases.items():
        for phase, begin, end in _split(phases, timeline.exposed.get(rank, ())):
            yield Slice(rank, "phases", phase, clock(begin), clock(end))
        ready = [(index, clock(time)) for index, time, _ in timeline.buckets.get(rank, ())]
        times = [clock(time) for _, *both in phases for time in both] + [at for _, at in ready]
        if times:
            yield Slice(
                rank,
                "step",
                f"step {timeline.step} ({timeline.label})",
                min(times),
                max(times),
                inside=[
                    {"name": f"ready {index}", "cat": "ready", "ph": "i", "s": "t", "ts": at}
                    for index, at in ready
                ],
            )


def _split(
    phases: Sequence[tuple[str, int, int]], exposed: Intervals
) -> Iterator[tuple[str, int, int]]:
    """A backward pass ends when the means are there: what is exposed is a phase of its own."""
    for name, begin, end in phases:
        whole = [(begin, end)]
        for each in difference(whole, exposed) if name == "backward" else whole:
            yield name, *each
    for each in exposed:
        yield EXPOSED, *each


def _exchange(collective: Collective, clock: Clock, name: str) -> Iterator[Slice]:
    last = collective.last
    heads: list[Event] = []  # at the last rank, of the arrows to the others
    for rank, span in collective.members.items():
        begin, moves, end = clock(span.begin), clock(moves_from(span)), clock(span.end)
        inside = [] if rank != last else heads
        if begin < moves:
            waits = "wait" if last is None else f"wait for rank {last}"
            inside.append(complete(waits, "wait", begin=begin, end=moves))
            if moves < end:
                inside.append(complete("transfer", "transfer", begin=moves, end=end))
            if last is not None and moves < end and _is_open(collective.members[last], clock):
                # Into a slice that begins there: Perfetto turns an arrow round whose head is in
                # one that began before the one with its tail.
                arrow = {"name": "arrival", "cat": "arrival", "id": f"{name}.{rank}", "ts": moves}
                heads.append({**arrow, "ph": "s"})
                inside.append({**arrow, "ph": "f", "bp": "e"})
        title = f"{span.op or span.phase} {span.bucket}"
        yield Slice(rank, "exchange", title, begin, end, _args(span), inside)


def _is_open(span: Placed, clock: Clock) -> bool:
    return clock(span.begin) < clock(span.end)


def _args(span: Placed) -> dict[str, Any]:
    known = {"op": span.op, "group": span.group, "bytes": span.sent, "bucket": span.bucket}
    if span.arrival is None:
        known["wait_ms"] = "not known: not every member has recorded this step"
    else:
        known["wait_ms"] = (moves_from(span) - span.begin) / 1e6
    rate = mbit_per_s(span)
    known["Mbit/s"] = "not known: it took no time" if rate is None else round(rate, 2)
    return known


def rates_of(timeline: Timeline, clock: Clock) -> Iterator[Event]:
    """Counters of all ranks: a line for each group."""
    for rank, spans in timeline.spans.items():
        for at, by_group in rates(spans):
            args = {group: round(rate, 2) for group, rate in by_group.items()}
            yield {"name": "sends, Mbit/s", "ph": "C", "ts": clock(at), "pid": rank, "args": args}
