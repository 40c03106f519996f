"""A summary at a terminal, or in the log of a job."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_dist.base.console import stdout_console
from lightning_dist.profiling.analysis.metrics import METRICS, MISSING, TEXT
from lightning_dist.profiling.analysis.parts import EXPOSED, Summary
from lightning_dist.profiling.report.tables import (
    RANK_COLUMNS,
    View,
    facts,
    parts_table,
    ranks_table,
    whatif_table,
)

_MOST_RANKS = 8
_WORST_RANKS = 4
_BEST_SETTINGS = 4
_RANK_COLUMNS = (*RANK_COLUMNS[:6], "clock_uncertainty_ms")


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Print headline, facts, parts of the step, ranks, predictions and notes."""
    console = console or stdout_console()
    console.print(Text(summary.headline, style="bold"))
    if summary.steps:
        console.print(_overview(summary))
        if len(summary.ranks) > 1:
            title, shown = _ranks(summary)
            ranks = ranks_table(summary)
            console.print(title)
            console.print(draw_table(ranks, [ranks.rows[at] for at in shown], _RANK_COLUMNS))
        if summary.predictions is not None:
            predicted = whatif_table(summary)
            console.print(Text(f"{predicted.title}, ms (sent: MB):", style="bold"))
            console.print(draw_table(predicted, predicted.rows[: 1 + _BEST_SETTINGS]))
    for note in summary.notes:
        console.print(Text(f"note: {note}"))


def _overview(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts(summary):
        table.add_row(*map(Text, (fact.label, fact.value, fact.detail)))
    parts = parts_table(summary)
    exposed = {METRICS[name].label for name in EXPOSED}
    for name, time, share, meaning in parts.rows:
        value, remark = (time, meaning) if time == MISSING else (f"{time} ms", share)
        style = "yellow" if name in exposed else ""
        table.add_row(Text(f"  {name}", style=style), Text(value), Text(remark))
    if parts.missing:
        table.add_row("parts", MISSING, Text(parts.missing))
    if "predictions" in summary.unavailable:
        table.add_row("predictions", MISSING, Text(summary.unavailable["predictions"]))
    return table


def _ranks(summary: Summary) -> tuple[str, Sequence[int]]:
    """A title, and which ranks it is of, by their place: all, or those most waited for."""
    everyone = range(len(summary.ranks))
    if len(everyone) <= _MOST_RANKS:
        return "ranks, ms:", everyone
    waited_for = [rank.waited_for_ms or 0 for rank in summary.ranks]
    worst = sorted(everyone, key=lambda at: -waited_for[at])[:_WORST_RANKS]
    return f"{len(worst)} of {len(everyone)} ranks, those others waited for most, ms:", worst


def draw_table(view: View, rows: Sequence[Sequence[str]], keys: Sequence[str] = ()) -> Table:
    """Some rows of a table, and all of its columns or those with ``keys``."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = [at for at, column in enumerate(view.columns) if not keys or column.key in keys]
    for column in (view.columns[at] for at in shown):
        label, is_text = column.label.replace(" ", "\n"), column.unit == TEXT
        table.add_column(label, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[at]) for at in shown))
    return table
