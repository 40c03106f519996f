"""``summary.json`` and ``steps.csv``: what was measured, for programs and spreadsheets."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dist.profiling.analysis.collectives import begin_of
from lightning_dist.profiling.analysis.parts import PARTS, Summary
from lightning_dist.profiling.analysis.tables import MS, step_table
from lightning_dist.profiling.capture.files import replace_file
from lightning_dist.profiling.run import Run

_TIMES = (*PARTS, "exposed", "hidden", "exchange")
STEP_COLUMNS = (
    "step",
    "rank",
    "host",
    "in_summary",
    "begin_ms",
    "step_ms",
    *(f"{name}_ms" for name in _TIMES),
)


def to_json(content: Mapping[str, Any]) -> str:
    """JSON that every reader takes: what is no finite number (lost gradients) is null."""
    return json.dumps(_finite(content), indent=2, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_summary(path: str | Path, summary: Summary) -> None:
    """Write ``summary.json``.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(path, to_json(summary.as_dict()).encode() + b"\n")


def write_csv(path: str | Path, run: Run, summary: Summary) -> None:
    """Write ``steps.csv``, for spreadsheets and pandas.

    It has a row for every step and rank, also for those that the summary leaves out
    (``in_summary`` 0). ``begin_ms`` counts from the first of them, ``exchange_ms`` is how long any
    exchange was under way. What was not recorded is empty, and so is a zero of what the summary
    does not know.

    Raises:
        OSError: it cannot be written.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(STEP_COLUMNS)
    writer.writerows(_rows(run, summary))
    # Text from a damaged file may hold half characters, which no encoding knows.
    replace_file(path, text.getvalue().encode(errors="replace"))


def _rows(run: Run, summary: Summary) -> Iterator[Sequence[object]]:
    ranks = {rank: each for rank, each in run.ranks.items() if each.steps}
    steps = sorted(set[int]().union(*(each.steps for each in ranks.values())))
    counted = set(Run(ranks).common_steps[summary.warmup_steps :])
    means = {"exposed": summary.exposed_ms, "hidden": summary.hidden_ms, **summary.breakdown_ms}
    means["exchange"] = summary.hidden_ms
    table = step_table(run, steps)
    times = np.stack([table.of(name) / MS for name in _TIMES], axis=2)
    unknown = [means.get(name) is None for name in _TIMES]
    times[(times == 0) & unknown] = np.nan
    begins = {(s, r): begin_of(run, r, s) for r, each in ranks.items() for s in each.steps}
    first = min(begins.values(), default=0)
    for i, step in enumerate(steps):
        for row, (rank, each) in enumerate(ranks.items()):
            if step in each.steps:
                begin, duration = begins[step, rank] - first, each.head(step).duration
                own = (None if math.isnan(value) else value for value in times[i, row].tolist())
                head = step, rank, each.metadata.host, int(step in counted)
                yield (*head, begin / MS, duration / MS, *own)
