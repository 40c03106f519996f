"""Console for tables of commands and callbacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_WIDE = 10_000


def stdout_console() -> Console:
    """Standard output, as wide as its terminal; without one, a line of a table stays a line."""
    return Console(
        width=None if sys.stdout.isatty() else _WIDE,
        highlight=False,
        color_system=None if os.environ.get("NO_COLOR") else "auto",  # None: no bold text either
    )


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Sequence[str] = (),
    fold: Sequence[str] = (),
) -> None:
    """Print rows in columns, without a frame; cells are text, not markup.

    Args:
        right: columns that are aligned to the right.
        fold: columns that may take several lines where the terminal is narrow.
    """
    headers = [
        Column(
            Text(name),
            justify="right" if name in right else "left",
            overflow="fold" if name in fold else "ellipsis",
            no_wrap=name not in fold,
        )
        for name in columns
    ]
    table = Table(*headers, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    stdout_console().print(table)


def is_plain() -> bool:
    """True if there is no terminal or NO_COLOR is set: text then has no colours and no boxes."""
    is_seen = sys.stdout.isatty() and sys.stderr.isatty()
    return bool(os.environ.get("NO_COLOR")) or not is_seen
