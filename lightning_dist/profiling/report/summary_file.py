"""``summary.json`` and ``steps.csv``: what was measured, for programs and spreadsheets."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_dist.profiling.analysis.collectives import begin_of
from lightning_dist.profiling.analysis.parts import PARTS, Summary
from lightning_dist.profiling.analysis.tables import MS, step_table
from lightning_dist.profiling.run import Run, replace_file

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
    table = step_table(run, steps)
    times = [(table.of(name) / MS).tolist() for name in _TIMES]
    unknown = [name not in _known(summary) for name in _TIMES]
    begins = {(s, r): begin_of(run, r, s) for r, each in ranks.items() for s in each.steps}
    first = min(begins.values(), default=0)
    for i, step in enumerate(steps):
        for row, (rank, each) in enumerate(ranks.items()):
            if step in each.steps:
                own = [of[i][row] for of in times]
                yield (
                    step,
                    rank,
                    each.metadata.host,
                    int(step in counted),
                    (begins[step, rank] - first) / MS,
                    each.head(step).duration / MS,
                    *(
                        None if math.isnan(value) or (not value and is_unknown) else value
                        for value, is_unknown in zip(own, unknown, strict=True)
                    ),
                )


def _known(summary: Summary) -> set[str]:
    """Names of times that the summary knows."""
    hidden = summary.hidden_ms
    means = {"exposed": summary.exposed_ms, "hidden": hidden, "exchange": hidden}
    means.update(summary.breakdown_ms)
    return {name for name, mean in means.items() if mean is not None}
