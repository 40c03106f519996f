"""A summary at a terminal, or in the log of a job."""

from __future__ import annotations

from collections.abc import Sequence

from rich import table as rich
from rich.console import Console
from rich.text import Text

from lightning_dist.console import stdout_console
from lightning_dist.profiling.analysis.metrics import METRICS, TEXT
from lightning_dist.profiling.analysis.parts import EXPOSED, Summary
from lightning_dist.profiling.report.tables import (
    RANK_COLUMNS,
    Table,
    facts,
    parts_table,
    ranks_table,
    whatif_table,
)

_MOST_RANKS = 8
_WORST_RANKS = 4
_BEST_SETTINGS = 4
_RANK_KEYS = (*RANK_COLUMNS[:6], "clock_uncertainty_ms")


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Print headline, facts, parts of the step, ranks, predictions and notes."""
    if console is None:
        console = stdout_console()
    console.print(Text(summary.headline, style="bold"))
    if summary.steps:
        console.print(_overview(summary))
        if len(summary.ranks) > 1:
            _print_ranks(summary, console)
        if summary.predictions is not None:
            found = whatif_table(summary, most=_BEST_SETTINGS)
            console.print(Text(f"{found.title}, ms:", style="bold"))
            print_table(console, found)
    for note in summary.notes:
        console.print(Text(f"note: {note}"))


def _overview(summary: Summary) -> rich.Table:
    table = rich.Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts(summary):
        table.add_row(*map(Text, (fact.label, fact.value, fact.detail)))
    parts = parts_table(summary)
    exposed = {METRICS[name].label for name in EXPOSED}
    for name, time, share, meaning in parts.rows:
        style = "yellow" if name in exposed else ""
        value = f"{time} ms" if time != "n/a" else time
        remark = meaning.removeprefix("n/a: ") if time == "n/a" else share
        table.add_row(Text(f"  {name}", style=style), Text(value), Text(remark))
    if parts.missing:
        table.add_row("parts", "n/a", Text(parts.missing))
    if "predictions" in summary.unavailable:
        table.add_row("predictions", "n/a", Text(summary.unavailable["predictions"]))
    return table


def _print_ranks(summary: Summary, console: Console) -> None:
    shown = [each.rank for each in summary.ranks]
    if len(shown) > _MOST_RANKS:
        worst = sorted(summary.ranks, key=lambda each: (-(each.waited_for_ms or 0), each.rank))
        shown = [each.rank for each in worst[:_WORST_RANKS]]
        console.print(
            f"{len(shown)} of {len(summary.ranks)} ranks, those others waited for most, ms:"
        )
    else:
        console.print("ranks, ms:")
    print_table(console, ranks_table(summary, ranks=shown), _RANK_KEYS)


def print_table(console: Console, table: Table, keys: Sequence[str] = ()) -> None:
    """Print a table, or its columns with these keys."""
    drawn = rich.Table(box=None, pad_edge=False, header_style="bold")
    at = [index for index, each in enumerate(table.columns) if not keys or each.key in keys]
    for column in (table.columns[index] for index in at):
        is_text = column.unit == TEXT
        label = column.label.replace(" ", "\n")
        drawn.add_column(label, justify="left" if is_text else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(row[index]) for index in at))
    console.print(drawn)
