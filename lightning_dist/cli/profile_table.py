"""What the commands print of two profiles."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from lightning_dist.console import stdout_console
from lightning_dist.profiling.analysis.compare import Difference
from lightning_dist.profiling.analysis.metrics import count
from lightning_dist.profiling.analysis.parts import PARTS, Summary

_UNITS = {"ms": "ms", "mb": "MB"}


def describe(summary: Summary) -> str:
    """What ran, in a few words."""
    run = summary.run
    hosts = len(set(run.get("hosts", ())))
    words = [
        str(run.get("codec") or "codec not known"),
        count(run.get("world_size", 0), "rank"),
        count(hosts, "host"),
        count(summary.steps, "step"),
    ]
    if (in_detail := len(summary.series.steps)) < summary.steps:
        words[-1] = f"{in_detail} of {words[-1]} in detail"
    return ", ".join(words)


def print_differences(differences: Sequence[Difference]) -> None:
    """One row for everything that was compared."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "A", "B", "B - A", "spread"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_column("", overflow="fold")
    for each in differences:
        table.add_row(*(Text(cell) for cell in _cells(each)))
    stdout_console().print(table)


def _cells(each: Difference) -> tuple[str, ...]:
    name, _, unit = each.name.rpartition("_")
    label = f"  {name}" if name in PARTS else name.replace("_", " ")

    def figure(value: float | None, sign: str = "") -> str:
        return "n/a" if value is None else f"{value:{sign}.2f} {_UNITS[unit]}"

    spread = "n/a" if each.spread is None else f"± {figure(each.spread)}"
    if each.difference is None:
        remark = each.reason
    elif each.is_explained:
        remark = "within the spread" if each.difference else ""
    else:
        remark = f"{100 * each.difference / each.a:+.1f} %" if each.a else ""
    return label, figure(each.a), figure(each.b), figure(each.difference, "+"), spread, remark
