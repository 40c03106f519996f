"""From finished runs to the rows of the convergence benchmark, and from the rows to its tables.

What the columns mean is in `benchmarks/convergence.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from benchmarks.convergence_settings import DDP_ROW, Job, Refused, Run
from benchmarks.report import print_table

Row = dict[str, Any]


@dataclass(kw_only=True)
class Cell:
    """All runs of one row of one task in one world."""

    job: Job
    ranks: int
    runs: list[Run] = field(default_factory=list)
    reason: str | None = None  # why it did not run, or what broke it

    def add(self, result: Run | Refused) -> None:
        if isinstance(result, Refused):
            self.reason = result.reason
        else:
            self.runs.append(result)


def summarize(cells: Sequence[Cell]) -> list[Row]:
    """One row of the JSON for every cell, compared with DDP's runs with the same seeds."""
    reference = {(c.job.task, c.ranks): c.runs for c in cells if c.job.codec is None}
    return [_row(cell, reference.get((cell.job.task, cell.ranks), [])) for cell in cells]


def show(rows: Sequence[Row]) -> None:
    """One table per task."""
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        names = list(next((row["metrics"] for row in of_task if row["metrics"]), {}))
        heads = [head for name in names for head in (name, "diff % of ddp", "in spread")]
        print_table(
            f"{task}: mean ± std over seeds; diff: paired by seed",
            columns=("row", "ranks", "EF", "x fewer bytes", *heads, "identical", "s a run"),
            rows=[_cells(row, names) for row in of_task],
        )
        for row in of_task:
            if row["reason"]:
                print(f"  {row['row']}, {row['ranks']} ranks: {row['reason']}")


def _row(cell: Cell, reference: Sequence[Run]) -> Row:
    runs = cell.runs
    names = list(runs[0].metrics) if runs else []
    return {
        "task": cell.job.task,
        "ranks": cell.ranks,
        "row": cell.job.row,
        "codec": cell.job.codec or DDP_ROW,
        "error_feedback": runs[0].error_feedback if runs else None,
        "seeds": [run.seed for run in runs],
        "metrics": {name: _metric(name, runs, reference) for name in names},
        "bytes_ratio": mean(run.bytes_ratio for run in runs) if runs else None,
        "replicas_identical": all(run.identical for run in runs) if runs else None,
        "seconds_per_run": round(mean(run.seconds for run in runs), 2) if runs else None,
        "reason": cell.reason,
    }


def _metric(name: str, runs: Sequence[Run], reference: Sequence[Run]) -> dict[str, Any]:
    """Statistics of one metric; None for what an infinite or missing value leaves undefined."""
    values = [run.metrics[name] for run in runs]
    ddp = {run.seed: run.metrics[name] for run in reference}
    pairs = [(run.metrics[name], ddp[run.seed]) for run in runs if run.seed in ddp]
    percent = [100 * (ours - theirs) / theirs for ours, theirs in pairs]
    spread, difference = _std(list(ddp.values())), _mean([ours - theirs for ours, theirs in pairs])
    return {
        "values": [value if math.isfinite(value) else None for value in values],
        "mean": _mean(values),
        "std": _std(values),
        "diff_pct_of_ddp": _mean(percent),
        "diff_pct_std": _std(percent),
        "within_ddp_spread": (
            None
            if spread is None or not pairs
            else difference is not None and abs(difference) <= spread
        ),
    }


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values and all(map(math.isfinite, values)) else None


def _std(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


def _cells(row: Row, names: Sequence[str]) -> list[Any]:
    cells = [row["row"], row["ranks"], _yes(row["error_feedback"]), _number(row["bytes_ratio"], 1)]
    for name in names:
        metric: Mapping[str, Any] = row["metrics"].get(name, {})
        cells.append(_with_spread(metric.get("mean"), metric.get("std"), 3))
        if row["codec"] == DDP_ROW:
            cells += [None, None]
            continue
        cells.append(_with_spread(metric.get("diff_pct_of_ddp"), metric.get("diff_pct_std"), 2))
        cells.append(_yes(metric.get("within_ddp_spread")))
    return [*cells, _yes(row["replicas_identical"]), row["seconds_per_run"]]


def _with_spread(value: float | None, spread: float | None, digits: int) -> str | None:
    if value is None or spread is None:
        return _number(value, digits)
    return f"{value:.{digits}f} ± {spread:.{digits}f}"


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "NO"
