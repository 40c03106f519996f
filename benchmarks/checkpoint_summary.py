"""Rows, goals and tables of the checkpoint benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmarks.checkpoint_timing import Sample
from benchmarks.report import print_table, quantile

JsonRow = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A median, and what there was besides."""

    median: float
    min: float
    spread: tuple[float, float]
    """First and third quartile."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(
            median=statistics.median(values),
            min=min(values),
            spread=(quantile(values, 0.25), quantile(values, 0.75)),
        )


@dataclass(frozen=True)
class Goal:
    """What was to be reached and what was measured, in one unit."""

    name: str
    measured: float
    goal: float
    unit: str

    @property
    def met(self) -> bool:
        return self.measured <= self.goal


def summarize(samples: dict[str, list[Sample]], growths: dict[str, int]) -> list[JsonRow]:
    """One row per way to save: figures in ms, percent and MB; None where there is no such thing."""
    rows = []
    for name, of_row in samples.items():
        row: JsonRow = {"row": name, "rounds": len(of_row)}
        for field in fields(Sample):
            values = [value for s in of_row if (value := getattr(s, field.name)) is not None]
            is_time = field.name.endswith("_s")
            key = f"{field.name}ms".replace("_sms", "_ms") if is_time else f"{field.name}_pct"
            scale = 1e3 if is_time else 1e2
            scaled = [scale * value for value in values]
            row[key] = asdict(Figure.of(scaled)) if scaled else None
        row["memory_mb"] = growths[name] / 1e6 if name in growths else None
        rows.append(row)
    return rows


def summarize_ranks(rounds: list[dict[str, float]]) -> JsonRow:
    """Stalls of two ranks that write one checkpoint; ratios are medians over rounds."""
    row: JsonRow = {"row": "ours blocking, 2 ranks", "rounds": len(rounds)}
    for name in rounds[0]:
        row[f"{name}_ms"] = asdict(Figure.of([1e3 * of_round[name] for of_round in rounds]))
    for base in ("memcpy", "alone"):
        slower = [max(r["rank0"], r["rank1"]) / r[base] for r in rounds]
        row[f"over_{base}"] = asdict(Figure.of(slower))
    return row


def goals_of(
    samples: dict[str, list[Sample]],
    growths: dict[str, int],
    ranks: list[dict[str, float]],
    *,
    state_mb: float,
) -> list[Goal]:
    """Every goal whose rows were measured."""

    def median(name: str, field: str) -> float | None:
        values = [getattr(sample, field) for sample in samples.get(name, ())]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def ratio(name: str, field: str, base: str) -> float | None:
        pairs = zip(samples.get(name, ()), samples.get(base, ()), strict=False)
        values = [getattr(one, field) / other.total_s for one, other in pairs]
        return statistics.median(values) if values else None

    goals = []

    def add(name: str, measured: float | None, goal: float, unit: str, scale: float = 1) -> None:
        if measured is not None:
            goals.append(Goal(name, scale * measured, goal, unit))

    overlap, blocking, sync = "ours overlap", "ours blocking", "ours sync"
    step = median(overlap, "plain_step_s")
    limit = max(5.0, 10 * step) if step else 5.0  # 1 % of a step, in ms
    add("overlap: stall", median(overlap, "stall_s"), limit, "ms", 1e3)
    add("overlap: held back in the next step", median(overlap, "held_s"), limit, "ms", 1e3)
    add("blocking: stall / memcpy", ratio(blocking, "stall_s", "limit: memcpy"), 1.1, "x")
    for name, field in ((sync, "total_s"), (blocking, "total_s"), (blocking, "write_s")):
        for base in ("limit: write + fsync", "limit: early write + fsync"):
            what = "total" if field == "total_s" else "write alone"
            title = f"{name.removeprefix('ours ')}: {what} / {base.removeprefix('limit: ')}"
            add(title, ratio(name, field, base), 1.3, "x")
    for name in (overlap, blocking):
        title = f"{name.removeprefix('ours ')}: slow-down of steps"
        add(title, median(name, "slowdown"), 5, "%", 100)
        growth = growths.get(name)
        add(f"{name.removeprefix('ours ')}: memory", growth, state_mb + 64, "MB", 1e-6)
    if ranks:
        row = summarize_ranks(ranks)
        for base in ("memcpy", "alone"):
            title = f"2 ranks: stall / {'memcpy' if base == 'memcpy' else 'stall of one'}"
            add(title, row[f"over_{base}"]["median"], 0.66 if base == "memcpy" else 0.6, "x")
    return goals


def show(rows: list[JsonRow], goals: list[Goal]) -> None:
    """Tables on stdout: medians, with the least in brackets."""
    names = [name for name, value in rows[0].items() if name.endswith(("_ms", "_pct"))]
    cells = [[row["row"], *(_cell(row[name]) for name in names), row["memory_mb"]] for row in rows]
    print_table("saves: median (least)", columns=["row", *names, "memory_mb"], rows=cells)
    print_table(
        "goals",
        columns=["goal", "measured", "at most", "unit", ""],
        rows=[
            [g.name, f"{g.measured:.2f}", f"{g.goal:.2f}", g.unit, "met" if g.met else "missed"]
            for g in goals
        ],
    )


def show_ranks(row: JsonRow) -> None:
    """The row of two ranks, one figure a line."""
    figures = {name: value for name, value in row.items() if isinstance(value, dict)}
    cells = [[name, _cell(figure, digits=2)] for name, figure in figures.items()]
    print_table(row["row"], columns=["", "median (least)"], rows=cells)


def _cell(figure: dict[str, Any] | None, *, digits: int = 1) -> str | None:
    if figure is None:
        return None
    return f"{figure['median']:.{digits}f} ({figure['min']:.{digits}f})"
