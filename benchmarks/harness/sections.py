"""Sections of documents: a Markdown table, refused rows with reasons, and a caption."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.tables import NA, Column, Row, escape, markdown, name_of

Result = Mapping[str, Any]  # {"meta": ..., "rows": [...]}
Rows = Sequence[Row]

__all__ = ["NA", "Result", "Rows", "Table", "caption", "links_of", "markdown", "reasons"]


def caption(text: str, meta: Mapping[str, Any]) -> str:
    """What was measured, and where and when."""
    machine, commit = meta["machine"], meta.get("git_commit") or "unknown"
    short = re.sub(r"^([0-9a-f]{7})[0-9a-f]+", r"\1", commit)
    return (
        f"<sub>{text} {meta['date'][:10]}, commit {short}, torch {meta['versions']['torch']}, "
        f"{machine['cpu']}, {machine['cores']} cores.</sub>"
    )


def reasons(rows: Iterable[Row]) -> list[str]:
    """One list, or none: each row that was refused or broke, and why."""
    of_row = {row.get("row") or row["codec"]: row["reason"] for row in rows if row.get("reason")}
    lines = [" ".join(f"{name_of(name)}: {why}".split()) for name, why in of_row.items()]
    return ["\n".join(f"- {escape(line)}" for line in lines)] if lines else []


@dataclass(frozen=True, kw_only=True)
class Table:
    """A section of one table and a caption.

    Args:
        columns: a head and how a cell is made, each.
        has: rows of the result that are in the table have this field;
        kinds: or are of these kinds.
        text: the caption, or what makes it of the meta data and the rows.
        total: what makes a last row of all rows.
    """

    columns: Sequence[Column]
    text: str | Callable[[Mapping[str, Any], Rows], str]
    has: str | None = None
    kinds: Sequence[str] = ()
    total: Callable[[Rows], Row] | None = None

    def __call__(self, result: Result) -> str | None:
        """The section; None where the result has no rows for it."""
        rows = [row for row in result["rows"] if self.has is None or self.has in row]
        if self.kinds:
            rows = [row for row in rows if row["kind"] in self.kinds]
        if not rows:
            return None
        of_kind = result["meta"].get("renewed", {})
        meta = of_kind.get(self.kinds[0], result["meta"]) if self.kinds else result["meta"]
        text = self.text if isinstance(self.text, str) else self.text(meta, rows)
        shown = [*rows, self.total(rows)] if self.total else rows
        return f"{markdown(self.columns, shown)}\n\n{caption(text, meta)}"


def links_of(rows: Rows) -> list[Any]:
    links = {row["link_mbit"] for row in rows}
    return sorted(links, key=lambda mbit: float("inf") if mbit is None else mbit)
