"""Tables of rows in Markdown, and the sections that they are in, for documents and terminals.

A column is a head and a template. A section is a table, refused rows with reasons, and a caption.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Rows = Sequence[Row]
Result = Mapping[str, Any]
"""``{"meta": ..., "rows": [...]}``"""
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
    """A table of rows: the first column names the row, the others are right-aligned."""
    lines = [[column[0] for column in columns], ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[cell_of(column, row) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines)


def _escape(text: str) -> str:
    return text.replace("|", r"\|")


def caption(text: str, meta: Mapping[str, Any]) -> str:
    """What was measured, and where and when."""
    machine = meta["machine"]
    return (
        f"<sub>{text} {measured(meta)}, torch {meta['versions']['torch']}, {machine['cpu']}, "
        f"{machine['cores']} cores.</sub>"
    )


def measured(meta: Mapping[str, Any]) -> str:
    """Day and commit."""
    commit = meta.get("git_commit") or "unknown"
    short = re.sub(r"^([0-9a-f]{7})[0-9a-f]+", r"\1", commit)
    return f"{meta['date'][:10]}, commit {short}"


def reasons(rows: Iterable[Row]) -> list[str]:
    """One list, or none: each row that was refused or failed, and why; of torch's hooks only that.

    Their exceptions come from inside torch.
    """
    of_row = {row.get("row") or row["codec"]: row["reason"] for row in rows if row.get("reason")}
    of_row |= {name: "fails on this setup" for name in of_row if name in _TORCH_NAMES}
    lines = [" ".join(f"{name_of(name)}: {why}".split()) for name, why in of_row.items()]
    return ["\n".join(f"- {_escape(line)}" for line in lines)] if lines else []


@dataclass(frozen=True, kw_only=True)
class Table:
    """A section of one table and a caption.

    Args:
        columns: a head and how a cell is made, each; or what makes them of the rows.
        text: the caption, or what makes it of the meta data and the rows.
        has: rows of the result that are in the table have a value of this field;
        kinds: or are of these kinds.
        lines: what makes the lines of the table of these rows.
        with_reasons: why other rows of the result are not in it is listed below it.
    """

    columns: Sequence[Column] | Callable[[Rows], Sequence[Column]]
    text: str | Callable[[Mapping[str, Any], Rows], str]
    has: str | None = None
    kinds: Sequence[str] = ()
    lines: Callable[[Rows], Iterable[Row]] = list
    with_reasons: bool = False

    def __call__(self, result: Result) -> str | None:
        """The section; None where the result has no rows for it."""
        rows = [row for row in result["rows"] if not self.has or row.get(self.has) is not None]
        rows = [row for row in rows if not self.kinds or row["kind"] in self.kinds]
        if not rows:
            return None
        meta = result["meta"]
        if self.kinds:
            meta = meta.get("renewed", {}).get(self.kinds[0], meta)
        text = self.text if isinstance(self.text, str) else self.text(meta, rows)
        columns = self.columns(rows) if callable(self.columns) else self.columns
        listed = reasons(result["rows"]) if self.with_reasons else []
        return "\n\n".join([markdown(columns, self.lines(rows)), *listed, caption(text, meta)])


def links_of(rows: Rows) -> list[Any]:
    """Rates of links, the slowest first."""
    links = {row["link_mbit"] for row in rows}
    return sorted(links, key=lambda mbit: float("inf") if mbit is None else mbit)
