"""The folder of one profiled run: ``rank<r>.jsonl`` of every rank, and what is made of them.

The lines are the truth; everything else in the folder can be made again from them.
"""

from __future__ import annotations

import gc
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from lightning_dist.profiling.analysis.clock_quality import offset_at, uncertainty_at
from lightning_dist.profiling.capture.lines import from_line, to_line
from lightning_dist.profiling.capture.records import (
    SCHEMA,
    BurstRecord,
    ClockRecord,
    EndRecord,
    ErrorRecord,
    LinkRecord,
    RankRecord,
    Record,
    StepRecord,
)
from lightning_dist.profiling.capture.step_lines import StepLines

_NAME = re.compile(r"rank(\d+)\.jsonl")


class RankFile:
    """Appends the records of one rank. Whole lines reach the file when they are written.

    Writing raises ``OSError`` where not all of it reaches the file. Nothing may follow then,
    because the last line may be incomplete.

    What an older run has left under its name goes: only rank 0 sees whether the number of a run is
    taken, and only on its own disk.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path, *, rank: int) -> None:
        self.path = Path(folder) / f"rank{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC
        self._handle: int | None = os.open(self.path, flags, 0o644)

    def write(self, records: Sequence[Record]) -> None:
        """Append them."""
        self.write_lines([to_line(each) for each in records])

    def write_lines(self, lines: Sequence[str]) -> None:
        """The same of what :func:`to_line` has made of them."""
        assert self._handle is not None
        content = memoryview("".join(f"{each}\n" for each in lines).encode())
        while content:  # nearly full disks, quotas and signals let it take a part only
            content = content[os.write(self._handle, content) :]

    def close(self) -> None:
        """Make what was written durable."""
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


@dataclass(frozen=True)
class RankRun:
    """What one rank has recorded, in the order of its lines.

    Args:
        steps: by number; where they were read from a folder, they stay in its files until they are
            asked for.
    """

    about: RankRecord
    steps: Mapping[int, StepRecord]
    clocks: Sequence[ClockRecord] = ()
    errors: Sequence[ErrorRecord] = ()
    links: Sequence[LinkRecord] = ()
    bursts: Sequence[BurstRecord] = ()
    end: EndRecord | None = None

    def head(self, step: int) -> StepRecord:
        """The step, maybe without phases, buckets and spans; for a look at all of them."""
        return self.steps.head(step) if isinstance(self.steps, StepLines) else self.steps[step]

    def offset(self, at: int) -> int:
        """Nanoseconds to add to this rank's clock at ``at`` to have rank 0's."""
        return offset_at(self.clocks, at)

    def uncertainty(self, at: int) -> int | None:
        """By how many nanoseconds that may be off; None: the clocks were never compared."""
        return uncertainty_at(self.clocks, at)


@dataclass(frozen=True)
class Run:
    """All ranks that have left something, and what is missing of the rest.

    Args:
        ranks: by rank.
        notes: what could not be read, and why; for the user to see.
    """

    ranks: Mapping[int, RankRun]
    notes: Sequence[str] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the run, whether or not they have left something."""
        return max((each.about.world_size for each in self.ranks.values()), default=0)

    @property
    def common_steps(self) -> list[int]:
        """Steps that all ranks which have left something have recorded."""
        of_ranks = [set(each.steps) for each in self.ranks.values()]
        return sorted(set.intersection(*of_ranks)) if of_ranks else []

    @property
    def unseen(self) -> str:
        """Why no bucket of the model can be seen; empty if they can."""
        return next((each.about.unseen for each in self.ranks.values() if each.about.unseen), "")

    @property
    def is_stock(self) -> bool:
        """Whether it is DDP's own exchange that is seen, and nothing is compressed."""
        stock = any(each.about.codec == "ddp" for each in self.ranks.values())
        return stock and not self.unseen


def run_folder(folder: str | Path) -> Path:
    """``folder``, or the only run in it where it is none itself."""
    folder = Path(folder)
    runs = _runs_in(folder)
    return runs[0] if len(runs) == 1 and not any(folder.glob("rank*.jsonl")) else folder


def _runs_in(folder: Path) -> list[Path]:
    return sorted({path.parent for path in folder.glob("*/rank*.jsonl")})


def new_run_folder(parent: Path, *, on_problem: Callable[[str], None]) -> Path:
    """The first ``run-<n>`` that is not there yet, or a temporary one."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in count():
            folder = parent / f"run-{number}"
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="comm_profile-"))
        on_problem(f"{error.filename}: {error.strerror}; the profile is in {folder}")
        return folder
    raise AssertionError("there are numbers enough")


def read_run(folder: str | Path) -> Run:
    """Everything that can be read of a profiled run.

    Lines that are cut short or foreign are left out, and ``notes`` say so.

    Raises:
        ValueError: it is no folder, or no rank has left anything in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one that CommProfiler has written")
    notes: list[str] = []
    ranks: dict[int, RankRun] = {}
    with _without_collector():
        for path in sorted(folder.glob("rank*.jsonl")):
            if _NAME.fullmatch(path.name) and (of_rank := _read_rank(path, notes)) is not None:
                ranks[of_rank.about.rank] = of_rank
    if not ranks:
        because = f" ({'; '.join(notes)})" if notes else ""
        runs = _runs_in(folder)
        instead = f"; give one of its runs: {', '.join(map(str, runs))}"
        raise ValueError(
            f"{folder} has no rank*.jsonl of a communication profile{because}"
            f"{instead if runs else ''}"
        )
    run = Run(_of_one_run(dict(sorted(ranks.items())), notes), notes)
    if missing := sorted(set(range(run.world_size)) - set(run.ranks)):
        notes.append(f"nothing of rank {', '.join(map(str, missing))}")
    last = {rank: max(each.steps, default=None) for rank, each in run.ranks.items()}
    newest = max((step for step in last.values() if step is not None), default=None)
    for rank, step in last.items():
        if step is None:
            notes.append(f"rank {rank} has recorded no step")
        elif newest is not None and step < newest:
            notes.append(f"rank {rank} is missing from step {step + 1} on")
    return run


def _of_one_run(ranks: dict[int, RankRun], notes: list[str]) -> dict[int, RankRun]:
    """Files that somebody has put together by hand may be of several: that of the first counts."""
    first = next(iter(ranks.values())).about
    kept = {}
    for rank, each in ranks.items():
        about = each.about
        if (about.codec, about.world_size) == (first.codec, first.world_size):
            kept[rank] = each
            continue
        notes.append(
            f"rank{rank}.jsonl is of another run, with {about.codec} and {about.world_size} ranks "
            f"instead of {first.codec} and {first.world_size}; left out"
        )
    return kept


@contextmanager
def _without_collector() -> Iterator[None]:
    """Records hold no cycles, and looking for some takes longer than reading them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read_rank(path: Path, notes: list[str]) -> RankRun | None:
    records: list[Record] = []
    steps = StepLines(path)
    bad: list[int] = []
    try:
        with path.open("rb") as file:
            bad = _read_lines(file, records, steps)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
    if bad:
        lines = "line" if len(bad) == 1 else "lines"
        notes.append(f"{path.name}: {len(bad)} {lines} cut short or foreign, first line {bad[0]}")
    abouts = [each for each in records if isinstance(each, RankRecord)]
    if not abouts:
        notes.append(f"{path.name} does not say whose it is")
        return None
    if abouts[0].schema > SCHEMA:
        notes.append(
            f"{path.name} is of schema {abouts[0].schema}, and this version knows {SCHEMA}; "
            "install a newer lightning_dist"
        )
        return None
    ends = [each for each in records if isinstance(each, EndRecord)]
    return RankRun(
        abouts[0],
        steps=steps,
        clocks=sorted(
            (each for each in records if isinstance(each, ClockRecord)), key=lambda each: each.at
        ),
        errors=[each for each in records if isinstance(each, ErrorRecord)],
        links=[each for each in records if isinstance(each, LinkRecord)],
        bursts=[each for each in records if isinstance(each, BurstRecord)],
        end=ends[-1] if ends else None,
    )


def _read_lines(file: Iterable[bytes], records: list[Record], steps: StepLines) -> list[int]:
    """Fill both; the numbers of the lines that are none of ours."""
    bad: list[int] = []
    at = 0
    for number, line in enumerate(file, start=1):
        try:
            record = from_line(line.decode(errors="replace"), rows=False)
            if isinstance(record, StepRecord):
                steps.add(record, at=at, length=len(line))
            elif record is not None:
                records.append(record)
        except ValueError:
            bad.append(number)
        at += len(line)
    return bad
