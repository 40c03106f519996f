"""The files made of a profile, each on its own: one that fails keeps no other away."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from csv import writer
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightning_dist.base.optional import needed_by
from lightning_dist.base.shared_folder import replace_file
from lightning_dist.profiling.analysis.breakdown import begin_of
from lightning_dist.profiling.analysis.parts import PARTS, Summary, Timeline
from lightning_dist.profiling.analysis.summarize import pick_steps
from lightning_dist.profiling.analysis.tables import MS, step_table
from lightning_dist.profiling.report.trace import write_trace
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
    ranks = {rank: each for rank, each in run.ranks.items() if each.steps}
    steps = sorted(set[int]().union(*(each.steps for each in ranks.values())))
    counted = set(Run(ranks).common_steps[summary.warmup_steps :])
    means = {"exposed": summary.exposed_ms, "hidden": summary.hidden_ms, **summary.breakdown_ms}
    means["exchange"] = summary.hidden_ms
    table = step_table(run, steps)
    times = np.stack([table.of(name) / MS for name in _TIMES], axis=2)
    times[(times == 0) & [means.get(name) is None for name in _TIMES]] = np.nan
    begins = {(s, r): begin_of(run, r, s) for r, each in ranks.items() for s in each.steps}
    first = min(begins.values(), default=0)
    for i, step in enumerate(steps):
        for row, (rank, each) in enumerate(ranks.items()):
            if step in each.steps:
                begin, duration = begins[step, rank] - first, each.head(step).duration
                own = (None if math.isnan(value) else value for value in times[i, row].tolist())
                head = step, rank, each.metadata.node, int(step in counted)
                yield (*head, begin / MS, duration / MS, *own)
