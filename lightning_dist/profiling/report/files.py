"""The files made of a profile, each on its own: one that fails keeps no other away.

``trace.json.gz`` is for Perfetto (ui.perfetto.dev) and chrome://tracing, with every rank a process.
It has Chrome's trace event format, of which viewers agree on this much: complete events (``X``) of
one thread nest or do not overlap; a flow (``s`` to ``f``) ties the slices that are open where it
begins and ends; of events at one time the first in the file came first. Times are whole
microseconds: viewers multiply fractions by 1000 and cut, and slices that touch would overlap.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from csv import writer
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from lightning_dist.base.optional import needed_by
from lightning_dist.base.shared_folder import replace_file
from lightning_dist.profiling.analysis.breakdown import begin_of
from lightning_dist.profiling.analysis.parts import (
    PARTS,
    Summary,
    Timeline,
    TimelineSpan,
    difference,
    lanes,
)
from lightning_dist.profiling.analysis.summarize import pick_steps
from lightning_dist.profiling.analysis.tables import MS, step_table
from lightning_dist.profiling.capture.events import OF_NO_BUCKET
from lightning_dist.profiling.run import Run

_TIMES = (*PARTS, "exposed", "hidden", "exchange")
STEP_COLUMNS = (
    *("step", "rank", "node", "in_summary", "begin_ms", "step_ms"),
    *(f"{name}_ms" for name in _TIMES),
)


class Written(NamedTuple):
    """Names of the files that were written, and a sentence for each that was not."""

    names: list[str]
    problems: list[str]


def write_files(
    folder: str | Path,
    run: Run,
    summary: Summary,
    *,
    html: bool = True,
    trace: bool = False,
    csv: bool = False,
) -> Written:
    """Write ``summary.json`` to ``folder``, and the other files that are wanted."""

    @cache
    def timelines() -> list[Timeline]:
        return pick_steps(run, summary)

    def write_page(path: Path) -> None:
        with needed_by("The page"):
            from lightning_dist.profiling.report.figures import write_report  # plotly takes long

        write_report(path, summary, timelines())

    writers: dict[str, tuple[bool, Callable[[Path], None]]] = {
        "summary.json": (True, lambda path: write_summary(path, summary)),
        "report.html": (html, write_page),
        "trace.json.gz": (trace, lambda path: write_trace(path, timelines(), run.nodes)),
        "steps.csv": (csv, lambda path: write_csv(path, run, summary)),
    }
    written = Written([], [])
    for name, (is_wanted, write) in writers.items():
        try:
            if is_wanted:
                Path(folder).mkdir(parents=True, exist_ok=True)
                write(Path(folder) / name)
                written.names.append(name)
        except Exception as error:  # the training, and the other files, are worth more
            known = isinstance(error, OSError | ImportError)
            why = str(error) if known else f"{type(error).__name__}: {error}"
            why = getattr(error, "strerror", None) or why
            written.problems.append(f"{name} not written to {folder}: {why}")
    return written


def to_json(content: Mapping[str, Any]) -> str:
    """JSON that every reader takes: what is no finite number (lost gradients) is null."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def write_summary(path: str | Path, summary: Summary) -> None:
    """Write ``summary.json``."""
    replace_file(path, to_json(summary.as_dict()).encode() + b"\n")


def write_csv(path: str | Path, run: Run, summary: Summary) -> None:
    """Write ``steps.csv``, for spreadsheets and pandas.

    A row for every step and rank, also for those that the summary leaves out (``in_summary`` 0).
    ``begin_ms`` counts from the first of them, ``exchange_ms`` is how long any exchange was under
    way. What is not known is empty.
    """
    text = io.StringIO(newline="")
    writer(text, lineterminator="\n").writerows([STEP_COLUMNS, *_rows(run, summary)])
    replace_file(path, text.getvalue().encode())


def _rows(run: Run, summary: Summary) -> Iterator[Sequence[object]]:
    ranks = {rank: rank_run for rank, rank_run in run.ranks.items() if rank_run.steps}
    steps = sorted(set[int]().union(*(rank_run.steps for rank_run in ranks.values())))
    counted = set(Run(ranks).common_steps[summary.warmup_steps :])
    means = {"exposed": summary.exposed_ms, "hidden": summary.hidden_ms, **summary.breakdown_ms}
    means["exchange"] = summary.hidden_ms
    table = step_table(run, steps)
    times = np.stack([table.of(name) / MS for name in _TIMES], axis=2)
    times[(times == 0) & [means.get(name) is None for name in _TIMES]] = np.nan
    begins = {(s, r): begin_of(run, r, s) for r, rank_run in ranks.items() for s in rank_run.steps}
    first = min(begins.values(), default=0)
    for i, step in enumerate(steps):
        for row, (rank, of_rank) in enumerate(ranks.items()):
            if step in of_rank.steps:
                begin, duration = begins[step, rank] - first, of_rank.head(step).duration
                figures = (None if math.isnan(value) else value for value in times[i, row].tolist())
                head = step, rank, of_rank.metadata.node, int(step in counted)
                yield (*head, begin / MS, duration / MS, *figures)


Event: TypeAlias = dict[str, Any]
_Slice: TypeAlias = list[Event]
"""A slice, and the events inside it; the category of the first is the track that it is on."""

_TRACKS = ("step", "phases", "codec", "exchange")
"""Tracks of a rank, in the order in which they are drawn."""

_FIRST_THREAD = 100_000
"""No rank is that high: viewers take the thread whose number is its process's for the main one."""

_ORDER = ("M", "X", "i", "s", "f")
"""Order of events at one time: slices are open before a flow looks for them."""


def write_trace(path: str | Path, timelines: Sequence[Timeline], nodes: Mapping[int, str]) -> None:
    """Write ``trace.json.gz``: the steps one after the other, all ranks below each other.

    A rank has its phases, with exposed communication cut out of the backward pass, codec work, and
    exchanges on as many lanes as were in flight at once. Where an exchange waited for the last
    rank, an arrow leads from its exchange to the transfer.
    """
    content = {
        "traceEvents": _events(timelines, nodes),
        "displayTimeUnit": "ms",
        "otherData": {f"step {timeline.step}": timeline.label for timeline in timelines},
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
            chosen = lanes([(event["ts"], event["ts"] + event["dur"]) for event, *_ in slices])
            for inside, lane in zip(slices, chosen, strict=True):
                thread = _FIRST_THREAD * (1 + _TRACKS.index(track)) + lane
                threads[rank, thread] = f"{track} {lane + 1}" if lane else track
                of_step += [{**event, "tid": thread} for event in inside]
        begin = min((event["ts"] for event in of_step), default=0)
        end = max((event["ts"] + event.get("dur", 0) for event in of_step), default=0)
        events += [{**event, "ts": event["ts"] + at - begin} for event in of_step]
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
        cut = [("exposed communication", *interval) for interval in exposed]
        for name, begin, end in phases:
            whole = [(begin, end)]
            left = difference(whole, exposed) if name == "backward" else whole
            cut += [(name, *interval) for interval in left]
        for part in cut:
            yield [_slice(rank, "phases", *part)]
        ready = [(f"ready {index}", at) for index, at, _ in timeline.buckets.get(rank, ())]
        times = [at for _, begin, end in phases for at in (begin, end)]
        if times := [*times, *(at for _, at in ready)]:
            name = f"step {timeline.step} ({timeline.label})"
            marks = (_event("i", rank, *mark, cat="ready", s="t") for mark in ready)
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
