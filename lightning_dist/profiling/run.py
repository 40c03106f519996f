"""The folder of one profiled run: ``rank<r>.jsonl`` of every rank, and what is made of them.

The lines are the truth; everything else in the folder can be made again from them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from typing_extensions import override

from lightning_dist.profiling.capture.events import (
    SCHEMA,
    BurstRecord,
    ClockRecord,
    EndRecord,
    ErrorRecord,
    GenerationRecord,
    LinkRecord,
    RankRecord,
    Record,
    StepRecord,
    from_line,
)

_NAME = re.compile(r"rank(\d+)\.jsonl")
_DRIFT = 1e-4
"""Most by which two clocks part: quartz is specified to be off by 50 in a million."""
_WANDER = 1e-6
"""Change of the rate of a quartz with its temperature within hours, about."""


class StepLines(Mapping[int, StepRecord]):
    """Steps of one rank by number, each read from its line when it is asked for.

    Minutes of a run are gigabytes of spans.

    Raises:
        OSError, ValueError: when a step is asked for, and the file is gone or another one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[int, int] = {}
        self._newest: StepRecord | None = None
        self.heads: dict[int, StepRecord] = {}
        """Steps without phases, buckets and spans."""

    def add(self, step: StepRecord, *, at: int) -> None:
        """Keep the head of ``step``, whose line begins at byte ``at``."""
        self.heads[step.step] = replace(step, phases=(), buckets=(), spans=())
        self._places[step.step] = at

    @override
    def __getitem__(self, step: int) -> StepRecord:
        at = self._places[step]
        if self._newest is None or self._newest.step != step:  # it is asked for several times
            with self._path.open("rb") as file:
                file.seek(at)
                line = file.readline()
            record = None
            with suppress(ValueError):
                record = from_line(line)
            if not isinstance(record, StepRecord) or record.step != step:
                raise ValueError(f"{self._path} has changed while it was read; read it again")
            self._newest = record
        return self._newest

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self.heads)

    @override
    def __len__(self) -> int:
        return len(self.heads)

    @override
    def __contains__(self, step: object) -> bool:
        return step in self.heads


@dataclass(frozen=True)
class RankRun:
    """Records of one rank, in the order of its lines; steps of a folder stay in its files."""

    metadata: RankRecord
    steps: Mapping[int, StepRecord]
    clocks: Sequence[ClockRecord] = ()
    errors: Sequence[ErrorRecord] = ()
    links: Sequence[LinkRecord] = ()
    bursts: Sequence[BurstRecord] = ()
    generations: Sequence[GenerationRecord] = ()
    end: EndRecord | None = None

    def head(self, step: int) -> StepRecord:
        """The step, maybe without phases, buckets and spans; for a look at all of them."""
        return self.steps.heads[step] if isinstance(self.steps, StepLines) else self.steps[step]

    def offset(self, at: int) -> int:
        """Nanoseconds to add to this rank's clock at ``at`` to have rank 0's."""
        return clock_at(self.clocks, at).offset if self.clocks else 0

    def uncertainty(self, at: int) -> int | None:
        """Bound of the error of the offset; None: the clocks were never compared."""
        return clock_at(self.clocks, at).uncertainty if self.clocks else None


def clock_at(readings: Sequence[ClockRecord], at: int) -> ClockRecord:
    """Offset and uncertainty of a clock when it shows ``at``, from its ``readings`` in order.

    Between two readings it drifts evenly, and before the first and after the last one as it did
    between the nearest two. Where these are too close to tell the drift, or there is only one, the
    offset stays. The uncertainty grows with the time to the nearest reading, by what is not known
    of the drift.
    """
    after = bisect_right(readings, at, key=attrgetter("at"))
    after = min(max(after, 1), len(readings) - 1)
    left, right = readings[max(after - 1, 0)], readings[after]
    nearest = left if at - left.at < right.at - at else right
    apart, away = right.at - left.at, at - nearest.at
    drift = (right.offset - left.offset) / apart if apart else 0.0
    # Bound of the error of the drift beyond these two.
    drift_error = (left.uncertainty + right.uncertainty) / apart + _WANDER if apart else _DRIFT
    if left.at <= at <= right.at:
        widening = (right.uncertainty - left.uncertainty) / apart if apart else 0.0
        uncertainty = nearest.uncertainty + away * widening + _WANDER * abs(away)
    else:
        drift = drift if drift_error < _DRIFT else 0.0
        uncertainty = nearest.uncertainty + abs(away) * min(drift_error, _DRIFT)
    if not any(reading.uncertainty for reading in readings):
        uncertainty = 0.0  # rank 0's own clock, which does not drift from itself
    return ClockRecord(at, nearest.offset + round(away * drift), round(uncertainty))


@dataclass(frozen=True)
class Run:
    """All ranks that have left something; ``notes`` say what could not be read, and why."""

    ranks: Mapping[int, RankRun]
    notes: Sequence[str] = ()

    @property
    def metadata(self) -> list[RankRecord]:
        """First line of every rank that has left something."""
        return [rank_run.metadata for rank_run in self.ranks.values()]

    @property
    def world_size(self) -> int:
        """Ranks of the run, whether or not they have left something."""
        return max((line.world_size for line in self.metadata), default=0)

    @property
    def nodes(self) -> dict[int, str]:
        """Node of every rank that has left something."""
        return {rank: rank_run.metadata.node for rank, rank_run in self.ranks.items()}

    def beside(self, ranks: Iterable[int]) -> list[int]:
        """All other ranks of the run."""
        return sorted(set(range(self.world_size)) - set(ranks))

    @property
    def generations(self) -> list[GenerationRecord]:
        """Changes of members within the process, as the first rank that knew of each tells it."""
        of_ranks = (rank_run.generations for rank_run in self.ranks.values())
        marks = {mark.number: mark for mark in chain.from_iterable(of_ranks)}
        return [marks[number] for number in sorted(marks)]

    @property
    def common_steps(self) -> list[int]:
        """Steps that all ranks which have left something have recorded."""
        of_ranks = [set(rank_run.steps) for rank_run in self.ranks.values()]
        return sorted(set.intersection(*of_ranks)) if of_ranks else []

    def clock_of(self, rank: int) -> tuple[int, int] | None:
        """Identity of the clock of a rank, equal on ranks that read the same one.

        None: it is on another node than rank 0, and was never compared with its clock.
        """
        of_rank = self.ranks[rank]
        if of_rank.clocks:
            return of_rank.clocks[0].offset, of_rank.clocks[0].uncertainty
        is_reference = 0 in self.ranks and of_rank.metadata.node == self.ranks[0].metadata.node
        return (0, 0) if is_reference else None

    @property
    def unseen(self) -> str:
        """Reason why no bucket of the model can be observed; empty if they can."""
        return next((line.unseen for line in self.metadata if line.unseen), "")

    @property
    def sync_every(self) -> int:
        """Local steps between two outer ones; 0: gradients are exchanged in every step."""
        return max((line.sync_every for line in self.metadata), default=0)

    @property
    def is_stock(self) -> bool:
        """Whether it is DDP's own exchange that is seen, and nothing is compressed."""
        return not self.unseen and any(line.codec == "ddp" for line in self.metadata)


def run_folder(folder: str | Path) -> tuple[Path, str]:
    """``folder``, or the newest run in it where it is none itself; and a note of the others."""
    folder = Path(folder)
    if any(folder.glob("rank*.jsonl")) or not (runs := _runs_in(folder)):
        return folder, ""
    newest, *others = runs
    names = ", ".join(run.name for run in others)
    return newest, f"{newest.name} is the newest run in {folder}; others: {names}" * bool(others)


def _runs_in(folder: Path) -> list[Path]:
    """The folders of runs in ``folder``, the newest first."""
    written: dict[Path, int] = {}
    for path in folder.glob("*/rank*.jsonl"):
        written[path.parent] = max(written.get(path.parent, 0), path.stat().st_mtime_ns)
    return sorted(written, key=lambda run: (written[run], run), reverse=True)


def read_run(folder: str | Path) -> Run:
    """Everything that can be read of a profiled run; ``notes`` say what is left out.

    Raises:
        ValueError: it is no folder, or no rank has left anything in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one that CommProfiler has written")
    notes: list[str] = []
    ranks: dict[int, RankRun] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        if _NAME.fullmatch(path.name) and (of_rank := _read_rank(path, notes)) is not None:
            ranks[of_rank.metadata.rank] = of_rank
    if not ranks:
        because = f" ({'; '.join(notes)})" if notes else ""
        runs = _runs_in(folder)
        instead = f"; give one of its runs: {', '.join(map(str, runs))}"
        raise ValueError(
            f"{folder} has no rank*.jsonl of a communication "
            f"profile{because}{instead if runs else ''}"
        )
    run = Run(_of_one_run(dict(sorted(ranks.items())), notes), notes)
    if missing := run.beside(run.ranks):
        notes.append(f"nothing of rank {', '.join(map(str, missing))}")
    last = {rank: max(rank_run.steps, default=None) for rank, rank_run in run.ranks.items()}
    newest = max((step for step in last.values() if step is not None), default=None)
    for rank, step in last.items():
        if step is None:
            notes.append(f"rank {rank} has recorded no step")
        elif newest is not None and step < newest:
            notes.append(f"rank {rank} is missing from step {step + 1} on")
    return run


def _of_one_run(ranks: dict[int, RankRun], notes: list[str]) -> dict[int, RankRun]:
    """Files that somebody has put together by hand may be of several: that of the first counts."""
    first = next(iter(ranks.values())).metadata
    kept = {}
    for rank, rank_run in ranks.items():
        metadata = rank_run.metadata
        size = metadata.world_size if not metadata.worker else first.world_size
        if (metadata.codec, size) == (first.codec, first.world_size):
            kept[rank] = rank_run
            continue
        notes.append(
            f"rank{rank}.jsonl is of another run, with {metadata.codec} and {metadata.world_size} "
            f"ranks instead of {first.codec} and {first.world_size}; left out"
        )
    return kept


def _read_rank(path: Path, notes: list[str]) -> RankRun | None:
    records: defaultdict[type[Record], list[Any]] = defaultdict(list)
    steps = StepLines(path)
    bad: list[int] = []
    at = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = from_line(line)
                    if isinstance(record, StepRecord):
                        steps.add(record, at=at)
                    elif record is not None:
                        records[type(record)].append(record)
                except ValueError:
                    bad.append(number)
                at += len(line)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
    if bad:
        lines = "line" if len(bad) == 1 else "lines"
        notes.append(f"{path.name}: {len(bad)} {lines} truncated or invalid, first line {bad[0]}")
    metadata = next(iter(records[RankRecord]), None)
    if metadata is None:
        notes.append(f"{path.name} does not name its rank")
        return None
    if metadata.schema != SCHEMA:
        notes.append(
            f"{path.name} was written by another version, in schema {metadata.schema} where this "
            f"one reads {SCHEMA}; install the lightning_dist that wrote it"
        )
        return None
    return RankRun(
        metadata,
        steps=steps,
        clocks=sorted(records[ClockRecord], key=attrgetter("at")),
        errors=records[ErrorRecord],
        links=records[LinkRecord],
        bursts=records[BurstRecord],
        generations=records[GenerationRecord],
        end=records[EndRecord][-1] if records[EndRecord] else None,
    )
