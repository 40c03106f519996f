"""Tables from rows: columns are heads and templates, in a terminal and in the documents."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]
Cell = str | Sequence[str] | Callable[[Row], str]
Column = tuple[str, Cell] | tuple[str, Cell, Any]
"""A head, and a template of `Template`, several with slashes between them, or a function of a row.
The third, if any, is the value in ``row["by"]`` of the row that the cell is of."""

_ONEBIT_PREFIX = "onebit-adam:"
_SUFFIXES = {"-noef": "no error feedback", "-warm": "first fifth uncompressed"}
_TORCH_NAMES = {
    "no-comm": "(no communication)",
    "ddp": "`ddp`, fp32",
    "torch-fp16-hook": "torch's fp16 hook",
    "torch-powersgd": "torch's PowerSGD hook, rank 4",
    "torch-powersgd-one-bucket": "torch's PowerSGD hook, rank 4, one bucket",
    "torch-quant-pertensor": "torch's per-tensor quantization hook",
    "torch-quant-perchannel": "torch's per-channel quantization hook",
}


def name_of(row: str) -> str:
    """A row of any benchmark for people."""
    if row in _TORCH_NAMES:
        return _TORCH_NAMES[row]
    if row.startswith(_ONEBIT_PREFIX):
        return f"`OneBitAdam`, `{row.removeprefix(_ONEBIT_PREFIX)}`"
    for suffix, meaning in _SUFFIXES.items():
        if row.endswith(suffix):
            return f"`{row.removesuffix(suffix)}`, {meaning}"
    return f"`{row}`"


def of_link(link_mbit: float | None) -> str:
    """A link for people."""
    return "unshaped" if link_mbit is None else f"{link_mbit:g} Mbit/s"


def megabytes(count: float) -> str:
    """Bytes as MB (10^6), with more digits where there are few."""
    return f"{count / 1e6:.1f}" if count >= 1e6 else f"{count / 1e6:.2f}"


class Template(string.Formatter):
    """``str.format`` with conversions of ours; a value that is None makes all of it n/a.

    ``!n`` is `name_of`, ``!l`` a link, ``!b`` megabytes, ``!y`` yes or no; ``:x100.1f`` multiplies.
    """

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except TypeError:  # a field of None
            return None, field_name

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion == "l":
            return of_link(value)
        if value is None:
            raise _Missing
        if conversion == "y":
            return "yes" if value else "no"
        makers = {"n": name_of, "b": megabytes}
        return makers[conversion](value) if conversion else value

    def format_field(self, value: Any, format_spec: str) -> str:
        if factor := re.match(r"x(\d+)", format_spec):
            return format(int(factor[1]) * value, format_spec[factor.end() :])
        return format(value, format_spec)


class _Missing(Exception):
    """A value of a template is None."""


_TEMPLATE = Template()


def cell_of(column: Column, row: Row, *, missing: str = "n/a") -> str:
    """The text of a cell."""
    _, cell, *value = column
    if value:
        row = row["by"].get(value[0])
    if row is None:
        return missing
    if callable(cell):
        return cell(row)
    if not isinstance(cell, str):
        return " / ".join(cell_of(("", each), row, missing=missing) for each in cell)
    try:
        return _TEMPLATE.vformat(cell, (), row)
    except _Missing:
        return missing


def pivot(rows: Iterable[Row], *, of: Sequence[str], by: str) -> list[Row]:
    """One row for each value of the fields ``of``; in ``by`` those that it is made of.

    A row begins as the first of its rows; a column with a value of ``by`` takes the row of it.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        merged = found.setdefault(tuple(row[name] for name in of), {**row, "by": {}})
        merged["by"][row[by]] = row
    return list(found.values())


def show(title: str, columns: Sequence[Column], rows: Iterable[Row]) -> None:
    """A table on stdout; what is not known is a dash."""
    cells = ([cell_of(column, row, missing="-") for column in columns] for row in rows)
    print_table(title, columns=[column[0] for column in columns], rows=cells)


def print_table(title: str, *, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """One table on stdout: the first column names the row, the others are right-aligned.

    None shows as a dash and a float with one decimal; format a value yourself where that is wrong.
    """
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_shown(value) for value in row))
    # A table in a file or a pipe is not cut to the width of a terminal that is not there.
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
