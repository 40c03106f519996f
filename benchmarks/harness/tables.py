"""Markdown tables of rows: columns are heads and templates, in a terminal and in the documents."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Cell = str | Sequence[str] | Callable[[Row], str]
Column = tuple[str, Cell] | tuple[str, Cell, Any]
"""A head, and a template of `Template`, several with slashes between them, or a function of a row.
The third, if any, is the value in ``row["by"]`` of the row that the cell is of."""

NA = "n/a"
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


def cell_of(column: Column, row: Row | None) -> str:
    """The text of a cell; n/a where a value is missing."""
    _, cell, *value = column
    if value:
        assert row is not None
        row = row["by"].get(value[0])
    if row is None:
        return NA
    if callable(cell):
        return cell(row)
    if not isinstance(cell, str):
        return " / ".join(cell_of(("", each), row) for each in cell)
    try:
        return _TEMPLATE.vformat(cell, (), row)
    except _Missing:
        return NA


def pivot(rows: Iterable[Row], *, of: Sequence[str], by: str) -> list[Row]:
    """One row for each value of the fields ``of``; in ``by`` those that it is made of.

    A row begins as the first of its rows; a column with a value of ``by`` takes the row of it.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        merged = found.setdefault(tuple(row[name] for name in of), {**row, "by": {}})
        merged["by"][row[by]] = row
    return list(found.values())


def markdown(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """A table of rows."""
    return _markdown(
        [column[0] for column in columns],
        [[cell_of(column, row) for column in columns] for row in rows],
    )


def print_table(title: str, *, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table of cells on stdout: None is n/a and a float has one decimal."""
    lines = [
        [NA if v is None else f"{v:,.1f}" if isinstance(v, float) else str(v) for v in row]
        for row in rows
    ]
    print(f"\n{title}\n\n{_markdown(columns, lines)}", flush=True)


def _markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """The first column names the row, the others are right-aligned."""
    table = [heads, ["---", *["---:"] * (len(heads) - 1)], *lines]
    return "\n".join(f"| {' | '.join(map(escape, line))} |" for line in table)


def escape(text: str) -> str:
    """For a cell of a table."""
    return text.replace("|", r"\|")
