"""Console for tables of commands and callbacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 10_000
_GAP = 2
"""Between two columns."""
_FOLDED = 20
"""Columns that a cell that folds needs at most."""


def stdout_console() -> Console:
    """Standard output, as wide as its terminal; without one, a line of a table stays a line."""
    return Console(
        width=None if sys.stdout.isatty() else _WIDE,
        highlight=False,
        color_system=None if os.environ.get("NO_COLOR") else "auto",  # None: no bold text either
    )


def print_lines(*lines: str) -> None:
    """Print lines as they are, wrapped between words where the terminal is narrow."""
    for line in lines:
        stdout_console().print(Text(line))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Sequence[str] = (),
    fold: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print rows in columns, without a frame; cells are text, not markup.

    Args:
        right: columns that are aligned to the right.
        fold: columns that may take several lines where the terminal is narrow.
        optional: columns that are left out where it is too narrow, the first of them first; a line
            below the table names them.
    """
    console, left_out = stdout_console(), list[str]()
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = {
        name: max(len(name), *(_width(row[at], folds=name in fold) for row in cells))
        for at, name in enumerate(columns)
    }

    def is_too_wide() -> bool:
        shown = [width for name, width in widths.items() if name not in left_out]
        return sum(shown) + _GAP * (len(shown) - 1) > console.width

    for name in optional:
        if is_too_wide():
            left_out.append(name)
    folds_all = is_too_wide()  # rather than cut
    shown = [at for at, name in enumerate(columns) if name not in left_out]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (columns[at] for at in shown):
        table.add_column(
            Text(name),
            justify="right" if name in right else "left",
            overflow="fold",
            no_wrap=name not in fold and not folds_all,
        )
    for row in cells:
        table.add_row(*(row[at] for at in shown))
    console.print(table)
    if left_out:
        names = ", ".join(name for name in columns if name in left_out)
        remedy = "use --json or a wider terminal"
        print_lines(f"Columns left out for {console.width} columns: {names} ({remedy})")


def _width(cell: Text, *, folds: bool) -> int:
    """Columns that a cell needs; of one that folds, those of its longest word, up to a limit."""
    if not folds:
        return cell.cell_len
    return min(max(map(len, cell.plain.split()), default=0), _FOLDED)


def is_plain() -> bool:
    """True if there is no terminal or NO_COLOR is set: text then has no colours and no boxes."""
    is_seen = sys.stdout.isatty() and sys.stderr.isatty()
    return bool(os.environ.get("NO_COLOR")) or not is_seen
