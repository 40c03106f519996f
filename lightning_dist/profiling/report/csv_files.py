"""``steps.csv`` and ``buckets.csv``, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path

from lightning_dist.profiling.analysis.breakdown import parts_of
from lightning_dist.profiling.analysis.collectives import begin_of
from lightning_dist.profiling.analysis.parts import PARTS, BucketSummary, StepParts, Summary
from lightning_dist.profiling.report.files import replace_file
from lightning_dist.profiling.run import Run

_MS = 1e6
"""Nanoseconds of a millisecond."""

STEP_COLUMNS = (
    "step",
    "rank",
    "host",
    "in_summary",
    "begin_ms",
    "step_ms",
    *(f"{name}_ms" for name in PARTS),
    "exposed_ms",
    "hidden_ms",
    "exchange_ms",
)
BUCKET_COLUMNS = ("bucket", *(each.name for each in fields(BucketSummary)[1:]))


def write_csv(folder: str | Path, run: Run, summary: Summary) -> None:
    """Write both.

    ``steps.csv`` has a row for every step and rank, also for those that the summary leaves out
    (``in_summary`` 0). ``begin_ms`` counts from the first of them, ``exchange_ms`` is how long any
    exchange was under way. What was not recorded is empty, and so is a zero of what the summary
    does not know. ``buckets.csv`` has the means of the
    summary.

    Raises:
        OSError: they cannot be written.
    """
    _write(Path(folder) / "steps.csv", STEP_COLUMNS, _steps(run, summary))
    buckets = (astuple(each) for each in summary.buckets)
    _write(Path(folder) / "buckets.csv", BUCKET_COLUMNS, buckets)


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    # Text from a damaged file may hold half characters, which no encoding knows.
    replace_file(path, text.getvalue().encode(errors="replace"))


def _steps(run: Run, summary: Summary) -> Iterator[Sequence[object]]:
    ranks = {rank: each for rank, each in run.ranks.items() if each.steps}
    counted = set(Run(ranks).common_steps[summary.skipped :])
    begins = {
        (step, rank): begin_of(run, rank, step)
        for rank, each in ranks.items()
        for step in each.steps
    }
    first = min(begins.values(), default=0)
    for step in sorted({step for step, _ in begins}):
        parts = {each.rank: each for each in parts_of(run, step)}
        for rank, each in ranks.items():
            if step in each.steps:
                yield (
                    step,
                    rank,
                    each.about.host,
                    int(step in counted),
                    (begins[step, rank] - first) / _MS,
                    each.head(step).duration / _MS,
                    *_parts(parts.get(rank), summary),
                )


def _parts(parts: StepParts | None, summary: Summary) -> Iterator[float | None]:
    if parts is None:
        yield from [None] * (len(PARTS) + 3)
        return
    known = {**summary.parts_ms, "exposed": summary.exposed_ms, "hidden": summary.hidden_ms}
    found = {**parts.parts, "exposed": parts.exposed, "hidden": parts.hidden}
    for name, value in found.items():
        yield None if not value and known.get(name) is None else value / _MS
    yield None if not parts.union and summary.hidden_ms is None else parts.union / _MS
