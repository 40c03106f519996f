"""A trace for Perfetto (ui.perfetto.dev) and chrome://tracing: every rank a process.

Chrome's trace event format, of which viewers agree on this much: complete events (``X``) of one
thread nest or do not overlap; a flow (``s`` to ``f``) ties the slices that are open where it begins
and ends; of events at one time the first in the file came first. Times are whole microseconds:
viewers multiply fractions by 1000 and cut, and slices that touch would overlap.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightning_dist.base.shared_folder import replace_file
from lightning_dist.profiling.analysis.parts import Timeline, TimelineSpan, difference, lanes
from lightning_dist.profiling.capture.events import OF_NO_BUCKET

Event: TypeAlias = dict[str, Any]
_Slice: TypeAlias = list[Event]
"""A slice, and the events inside it; the category of the first is the track that it is on."""

_TRACKS = ("step", "phases", "codec", "exchange")
"""In the order in which they are drawn."""

_FIRST_THREAD = 100_000
"""No rank is that high: viewers take the thread whose number is its process's for the main one."""

_ORDER = ("M", "X", "i", "s", "f")
"""Of events at one time: slices are open before a flow looks for them."""


def write_trace(path: str | Path, timelines: Sequence[Timeline], nodes: Mapping[int, str]) -> None:
    """Write ``trace.json.gz``: the steps one after the other, all ranks below each other.

    A rank has its phases, with exposed communication cut out of the backward pass, codec work, and
    exchanges on as many lanes as were in flight at once. Where an exchange waited for the last
    rank, an arrow leads from its exchange to the transfer.
    """
    content = {
        "traceEvents": _events(timelines, nodes),
        "displayTimeUnit": "ms",
        "otherData": {f"step {each.step}": each.label for each in timelines},
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    replace_file(path, gzip.compress(text.encode(), mtime=0))


def _events(timelines: Sequence[Timeline], nodes: Mapping[int, str]) -> list[Event]:
    events: list[Event] = []
    threads: dict[tuple[int, int], str] = {}
    flows, at = itertools.count(1), 0
    for timeline in timelines:
        of_step: list[Event] = []
        tracks: dict[tuple[int, str], list[_Slice]] = defaultdict(list)
        for inside in (*_phases(timeline), *_work(timeline, flows)):
            tracks[inside[0]["pid"], inside[0]["cat"]].append(inside)
        for (rank, track), slices in tracks.items():
            chosen = lanes([(each["ts"], each["ts"] + each["dur"]) for each, *_ in slices])
            for inside, lane in zip(slices, chosen, strict=True):
                thread = _FIRST_THREAD * (1 + _TRACKS.index(track)) + lane
                threads[rank, thread] = f"{track} {lane + 1}" if lane else track
                of_step += [{**each, "tid": thread} for each in inside]
        begin = min((each["ts"] for each in of_step), default=0)
        end = max((each["ts"] + each.get("dur", 0) for each in of_step), default=0)
        events += [{**each, "ts": each["ts"] + at - begin} for each in of_step]
        at += (end - begin) * 21 // 20 + 1
    for rank in sorted({*nodes, *(rank for rank, _ in threads)}):
        node = f" @ {nodes[rank]}" if nodes.get(rank) else ""
        events += _named("process", rank, f"rank {rank}{node}", rank)
    for (rank, thread), name in sorted(threads.items()):
        events += _named("thread", rank, name, thread, tid=thread)
    # A slice comes before those in it, which begin no earlier: sorting keeps that.
    return sorted(events, key=lambda event: (event["ts"], _ORDER.index(event["ph"])))


def _event(phase: str, rank: int, name: str, at: int, **more: Any) -> Event:
    """An event; times of arguments are nanoseconds."""
    return {"name": name, "ph": phase, "ts": round(at / 1000), "pid": rank, **more}


def _slice(rank: int, category: str, name: str, begin: int, end: int, **more: Any) -> Event:
    lasted = round(end / 1000) - round(begin / 1000)
    return _event("X", rank, name, begin, dur=lasted, cat=category, **more)


def _named(kind: str, rank: int, name: str, order: int, **more: int) -> list[Event]:
    """Name of a process or a thread, and its place among the others."""
    facts = {"name": name, "sort_index": order}
    return [_event("M", rank, f"{kind}_{k}", 0, args={k: v}, **more) for k, v in facts.items()]


def _phases(timeline: Timeline) -> Iterator[_Slice]:
    """Steps and phases; exposed communication is a phase of its own."""
    for rank, phases in timeline.phases.items():
        exposed = timeline.exposed.get(rank, ())
        cut = [("exposed communication", *each) for each in exposed]
        for name, begin, end in phases:
            whole = [(begin, end)]
            left = difference(whole, exposed) if name == "backward" else whole
            cut += [(name, *each) for each in left]
        for each in cut:
            yield [_slice(rank, "phases", *each)]
        ready = [(f"ready {index}", at) for index, at, _ in timeline.buckets.get(rank, ())]
        times = [at for _, begin, end in phases for at in (begin, end)]
        if times := [*times, *(at for _, at in ready)]:
            name = f"step {timeline.step} ({timeline.label})"
            marks = (_event("i", rank, *each, cat="ready", s="t") for each in ready)
            yield [_slice(rank, "step", name, min(times), max(times)), *marks]


def _work(timeline: Timeline, flows: Iterator[int]) -> Iterator[_Slice]:
    """Codec work, and exchanges by collective, in which ranks wait for the last of them."""
    collectives: dict[object, dict[int, TimelineSpan]] = defaultdict(dict)
    for rank, spans in timeline.spans.items():
        for number, span in enumerate(spans):
            if span.phase == "exchange":
                key = (rank, number) if span.collective_id is None else span.collective_id
                collectives[key][rank] = span
            else:
                name, args = f"{span.phase} {span.bucket}", {"bucket": span.bucket}
                yield [_slice(rank, "codec", name, span.begin, span.end, args=args)]
    for members in collectives.values():
        lasts = {span.last if span.last in members else None for span in members.values()}
        last = lasts.pop() if len(lasts) == 1 else None  # None: not known, or not shown
        slices = {rank: [_exchange(rank, span)] for rank, span in members.items()}
        for rank, span in members.items():
            name, moves = "wait" if last is None else f"wait for rank {last}", span.transfer[0]
            wait = _slice(rank, "wait", name, span.begin, moves)
            transfer = _slice(rank, "transfer", "transfer", moves, span.end)
            if wait["dur"]:
                slices[rank].append(wait)
            if wait["dur"] and transfer["dur"]:
                slices[rank].append(transfer)
                if last is not None and slices[last][0]["dur"]:
                    # Into a slice that begins there: Perfetto turns an arrow round whose head is in
                    # one that began before the one with its tail.
                    flow = {"cat": "arrival", "id": next(flows)}
                    slices[last].append(_event("s", last, "arrival", moves, **flow))
                    slices[rank].append(_event("f", rank, "arrival", moves, bp="e", **flow))
        yield from slices.values()


def _exchange(rank: int, span: TimelineSpan) -> Event:
    begin, end = span.transfer
    unknown = "not known: not every member has recorded this step"
    args = {
        **{"op": span.op, "group": span.group, "bytes": span.sent, "bucket": span.bucket},
        "wait_ms": unknown if span.arrival is None else (begin - span.begin) / 1e6,
        "Mbit/s": "not known: it took no time",
    }
    if begin < end:
        args["Mbit/s"] = round(span.sent * 8000 / (end - begin), 2)
    bucket = "of FSDP" if span.bucket == OF_NO_BUCKET else span.bucket
    name = f"{span.op or span.phase} {bucket}"
    return _slice(rank, "exchange", name, span.begin, span.end, args=args)
