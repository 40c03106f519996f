"""A trace for Perfetto (ui.perfetto.dev) and chrome://tracing: every rank a process.

Chrome's trace event format, of which viewers agree on this much: complete events (``X``) of one
thread nest or do not overlap; a flow (``s`` to ``f``) ties the slices that are open where it begins
and ends, and its ``id`` is a number; of events at one time the first in the file came first. Times
are whole microseconds: viewers multiply fractions by 1000 and cut, and slices that touch would
overlap.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightning_dist.profiling.analysis.intervals import difference, lanes
from lightning_dist.profiling.analysis.parts import Timeline, TimelineSpan
from lightning_dist.profiling.run import replace_file

Event: TypeAlias = dict[str, Any]
_Clock: TypeAlias = Callable[[int], int]
"""From nanoseconds of a step to microseconds of the trace."""
_Slice: TypeAlias = tuple[int, str, list[Event]]
"""Rank, track, and a slice with what is inside it."""

_TRACKS = ("step", "phases", "codec", "exchange")
"""In the order in which they are drawn."""

_FIRST_THREAD = 100_000
"""No rank is that high: viewers take the thread whose number is its process's for the main one."""

_GAP = 20
"""Between two steps is so much less than the longest of them lasts."""

_ORDER = ("M", "X", "i", "C", "s", "f")
"""Of events at one time: slices are open before a flow looks for them."""


def write_trace(path: str | Path, timelines: Sequence[Timeline], about: Mapping[int, str]) -> None:
    """Write ``trace.json.gz``: the steps one after the other, all ranks below each other.

    A rank has its phases, with exposed communication cut out of the backward pass, codec work,
    exchanges on as many lanes as were in flight at once, and the rate at which it sent. Where an
    exchange waited for the last rank, wait and transfer are nested in it, and an arrow leads from
    the last rank's exchange to the transfer.

    Args:
        about: host by rank.

    Raises:
        OSError: it cannot be written.
    """
    content = {
        "traceEvents": _events(timelines, about),
        "displayTimeUnit": "ms",
        "otherData": {f"step {each.step}": each.label for each in timelines},
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    replace_file(path, gzip.compress(text.encode(), mtime=0))


def _events(timelines: Sequence[Timeline], about: Mapping[int, str]) -> list[Event]:
    slices: dict[tuple[int, str], list[list[Event]]] = defaultdict(list)
    events: list[Event] = []
    flows = itertools.count(1)
    bounds = [_bounds(each) for each in timelines]
    gap = max((end - begin for begin, end in bounds), default=0) // _GAP + 1000
    at = 0
    for timeline, (begin, end) in zip(timelines, bounds, strict=True):

        def clock(time: int, shift: int = at - begin) -> int:
            return round((time + shift) / 1000)

        for rank, track, inside in (*_phases(timeline, clock), *_spans(timeline, clock, flows)):
            slices[rank, track].append(inside)
        events += _rates(timeline, clock)
        at += end - begin + gap
    for rank in sorted({*about, *(of for of, _ in slices)}):
        host = f" @ {about[rank]}" if about.get(rank) else ""
        events.append(_metadata("process_name", rank, name=f"rank {rank}{host}"))
        events.append(_metadata("process_sort_index", rank, sort_index=rank))
        thread = _FIRST_THREAD
        for track in _TRACKS:
            of_track = slices.get((rank, track), [])
            chosen = lanes([(each["ts"], each["ts"] + each["dur"]) for each, *_ in of_track])
            for lane in sorted({*chosen}):
                name, order = f"{track} {lane + 1}" if lane else track, thread - _FIRST_THREAD
                named = _metadata("thread_name", rank, name=name)
                placed = _metadata("thread_sort_index", rank, sort_index=order + lane)
                events += [{**each, "tid": thread + lane} for each in (named, placed)]
            for inside, lane in zip(of_track, chosen, strict=True):
                events += [{**each, "pid": rank, "tid": thread + lane} for each in inside]
            thread += len({*chosen})
    # A slice comes before those in it, which begin no earlier: sorting keeps that.
    return sorted(events, key=lambda event: (event["ts"], _ORDER.index(event["ph"])))


def _bounds(timeline: Timeline) -> tuple[int, int]:
    times = [time for of in timeline.phases.values() for _, *both in of for time in both]
    times += [ready for of in timeline.buckets.values() for _, ready, _ in of]
    times += [at for of in timeline.spans.values() for span in of for at in (span.begin, span.end)]
    times += [time for of in timeline.exposed.values() for both in of for time in both]
    return min(times, default=0), max(times, default=0)


def _metadata(kind: str, rank: int, **args: str | int) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": rank, "args": args}


def _slice(name: str, category: str, begin: int, end: int, **more: Any) -> Event:
    return {"name": name, "cat": category, "ph": "X", "ts": begin, "dur": end - begin, **more}


def _phases(timeline: Timeline, clock: _Clock) -> Iterator[_Slice]:
    """Steps and phases; exposed communication is a phase of its own."""
    for rank, phases in timeline.phases.items():
        exposed = timeline.exposed.get(rank, ())
        cut = [("exposed communication", *each) for each in exposed]
        for name, begin, end in phases:
            whole = [(begin, end)]
            left = difference(whole, exposed) if name == "backward" else whole
            cut += [(name, *each) for each in left]
        for name, begin, end in cut:
            yield rank, "phases", [_slice(name, "phases", clock(begin), clock(end))]
        ready = [
            {"name": f"ready {index}", "cat": "ready", "ph": "i", "s": "t", "ts": clock(time)}
            for index, time, _ in timeline.buckets.get(rank, ())
        ]
        ends = [clock(time) for _, *both in phases for time in both]
        ends += [clock(time) for _, time, _ in timeline.buckets.get(rank, ())]
        if ends:
            name = f"step {timeline.step} ({timeline.label})"
            yield rank, "step", [_slice(name, "step", min(ends), max(ends)), *ready]


def _spans(timeline: Timeline, clock: _Clock, flows: Iterator[int]) -> Iterator[_Slice]:
    """Codec work, and exchanges by collective."""
    collectives: dict[object, dict[int, TimelineSpan]] = {}
    for rank, spans in timeline.spans.items():
        for number, span in enumerate(spans):
            if span.phase == "exchange":
                key = (rank, number) if span.collective_id is None else span.collective_id
                collectives.setdefault(key, {})[rank] = span
            else:
                args = {"args": {"bucket": span.bucket}}
                name, begin, end = f"{span.phase} {span.bucket}", clock(span.begin), clock(span.end)
                yield rank, "codec", [_slice(name, "codec", begin, end, **args)]
    for members in collectives.values():
        yield from _collective(members, clock, flows)


def _collective(
    members: Mapping[int, TimelineSpan], clock: _Clock, flows: Iterator[int]
) -> Iterator[_Slice]:
    (last, *others) = {span.last if span.last in members else None for span in members.values()}
    if others:
        last = None  # not known, or not shown
    heads: list[Event] = []  # at the last rank, of the arrows to the others
    for rank, span in members.items():
        begin, moves, end = clock(span.begin), clock(_moves_from(span)), clock(span.end)
        inside: list[Event] = heads if rank == last else []
        if begin < moves:
            waits = "wait" if last is None else f"wait for rank {last}"
            inside.append(_slice(waits, "wait", begin, moves))
        if begin < moves < end:
            inside.append(_slice("transfer", "transfer", moves, end))
            if last is not None and clock(members[last].begin) < clock(members[last].end):
                # Into a slice that begins there: Perfetto turns an arrow round whose head is in
                # one that began before the one with its tail.
                arrow = {"name": "arrival", "cat": "arrival", "id": next(flows), "ts": moves}
                heads.append({**arrow, "ph": "s"})
                inside.append({**arrow, "ph": "f", "bp": "e"})
        wait, rate = (_moves_from(span) - span.begin) / 1e6, _mbit_per_s(span)
        unknown = "not known: not every member has recorded this step"
        args = {
            **{"op": span.op, "group": span.group, "bytes": span.sent, "bucket": span.bucket},
            "wait_ms": unknown if span.arrival is None else wait,
            "Mbit/s": "not known: it took no time" if rate is None else round(rate, 2),
        }
        title = f"{span.op or span.phase} {span.bucket}"
        inside.insert(0, _slice(title, "exchange", begin, end, args=args))
        yield rank, "exchange", inside  # to which later members may add


def _moves_from(span: TimelineSpan) -> int:
    """When an exchange no longer waited for others, as far as is known."""
    return span.begin if span.arrival is None else min(max(span.arrival, span.begin), span.end)


def _mbit_per_s(span: TimelineSpan) -> float | None:
    lasted = span.end - _moves_from(span)
    return span.sent * 8000 / lasted if lasted > 0 else None


def _rates(timeline: Timeline, clock: _Clock) -> Iterator[Event]:
    """Counters: what every rank sends in each group, were every exchange even."""
    for rank, spans in timeline.spans.items():
        moving = [
            (_moves_from(span), span.end, span.group, rate)
            for span in spans
            if span.phase == "exchange" and (rate := _mbit_per_s(span))
        ]
        for now in sorted({time for begin, end, _, _ in moving for time in (begin, end)}):
            args = dict.fromkeys(sorted({group for _, _, group, _ in moving}), 0.0)
            for begin, end, group, rate in moving:
                args[group] += rate * (begin <= now < end)
            rates = {group: round(rate, 2) for group, rate in args.items()}
            yield {"name": "sends, Mbit/s", "ph": "C", "ts": clock(now), "pid": rank, "args": rates}
