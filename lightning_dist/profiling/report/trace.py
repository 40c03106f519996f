"""A trace for Perfetto (ui.perfetto.dev) and chrome://tracing: every rank a process.

Chrome's trace event format, of which viewers agree on this much: complete events (``X``) of one
thread nest or do not overlap; a flow (``s`` to ``f``) ties the slices that are open where it begins
and ends, and its ``id`` is a number; of events at one time the first in the file came first.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lightning_dist.profiling.analysis.intervals import lanes
from lightning_dist.profiling.analysis.parts import Timeline
from lightning_dist.profiling.report.files import replace_file
from lightning_dist.profiling.report.trace_slices import (
    TRACKS,
    Clock,
    Event,
    Slice,
    rates_of,
    slices_of,
)

_FIRST_THREAD = 100_000
"""No rank is that high: viewers take the thread whose number is its process's for the main one."""

_GAP = 20
"""Between two steps is so much less than the longest of them lasts."""

_ORDER = ("M", "X", "i", "C", "s", "f")
"""Of events at one time: slices are open before a flow looks for them."""


def write_trace(path: str | Path, timelines: Sequence[Timeline], about: Mapping[int, str]) -> None:
    """Write ``trace.json.gz``: the steps one after the other, all ranks below each other.

    A rank has its phases, with the exposed exchange cut out of the backward pass, what the codec
    did, its exchanges on as many lanes as there were at once, and the rate at which it sent. Where
    an exchange waited for the rank that came last, waiting and transfer are in it, and an arrow
    leads from that rank's exchange to the transfer.

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
    slices: dict[int, list[Slice]] = {rank: [] for rank in about}
    counters: list[Event] = []
    for timeline, clock in zip(timelines, _clocks(timelines), strict=True):
        for each in slices_of(timeline, clock):
            slices.setdefault(each.rank, []).append(each)
        counters += rates_of(timeline, clock)
    ranks = [
        event
        for rank, of_rank in sorted(slices.items())
        for event in (*_process(rank, about.get(rank)), *_threads(rank, of_rank))
    ]
    # A slice comes before those in it, which begin no earlier: sorting keeps that.
    events = sorted([*ranks, *counters], key=lambda event: (event["ts"], _ORDER.index(event["ph"])))
    return list(_numbered(events))


def _numbered(events: Sequence[Event]) -> Iterator[Event]:
    numbers: dict[str, int] = {}
    for event in events:
        flow = event.get("id")
        yield event if flow is None else {**event, "id": numbers.setdefault(flow, len(numbers) + 1)}


def _clocks(timelines: Sequence[Timeline]) -> Iterator[Clock]:
    bounds = [_bounds(timeline) for timeline in timelines]
    gap = max((end - begin for begin, end in bounds), default=0) // _GAP + 1000
    at = 0
    for begin, end in bounds:
        yield Clock(at - begin)
        at += end - begin + gap


def _bounds(timeline: Timeline) -> tuple[int, int]:
    phases = [times for each in timeline.phases.values() for _, *times in each]
    ready = [[ready] for each in timeline.buckets.values() for _, ready, _ in each]
    spans = [[span.begin, span.end] for each in timeline.spans.values() for span in each]
    exposed = [times for each in timeline.exposed.values() for times in each]
    times = [time for each in (*phases, *ready, *spans, *exposed) for time in each]
    return min(times, default=0), max(times, default=0)


def _process(rank: int, host: str | None) -> Iterator[Event]:
    name = f"rank {rank} @ {host}" if host else f"rank {rank}"
    yield _about(rank, "process_name", name=name)
    yield _about(rank, "process_sort_index", sort_index=rank)


def _threads(rank: int, slices: Sequence[Slice]) -> Iterator[Event]:
    """Slices and what is inside them, on one thread for every lane of every track."""
    thread = _FIRST_THREAD
    for track in TRACKS:
        of_track = [each for each in slices if each.track == track]
        chosen = lanes([(each.begin, each.end) for each in of_track])
        for lane in range(max(chosen, default=-1) + 1):
            name = f"{track} {lane + 1}" if lane else track
            yield {**_about(rank, "thread_name", name=name), "tid": thread + lane}
            index = thread + lane - _FIRST_THREAD
            yield {**_about(rank, "thread_sort_index", sort_index=index), "tid": thread + lane}
        for each, lane in zip(of_track, chosen, strict=True):
            yield from ({**event, "pid": rank, "tid": thread + lane} for event in each.events())
        thread += max(chosen, default=-1) + 1


def _about(rank: int, what: str, **args: str | int) -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": rank, "args": args}
