"""What the tables of the documents are made of: names, numbers, captions, Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]  # {"meta": ..., "rows": [...]}
Row = Mapping[str, Any]

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


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown: the first column names the row, the others are right-aligned."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(_escape(cell) for cell in line) + " |" for line in lines)


def reasons(rows: Iterable[Row]) -> list[str]:
    """One list, or none: each row that was refused or broke, and why."""
    of_row = {row.get("row") or row["codec"]: row["reason"] for row in rows if row.get("reason")}
    lines = [f"{name_of(name)}: {why}" for name, why in of_row.items()]
    return ["\n".join(f"- {_escape(_one_line(line))}" for line in lines)] if lines else []


def caption(text: str, result: Result) -> str:
    """What was measured, and where and when."""
    meta = result["meta"]
    machine, commit = meta["machine"], meta.get("git_commit") or "unknown"
    short = re.sub(r"^([0-9a-f]{7})[0-9a-f]+", r"\1", commit)
    return (
        f"<sub>{text} {meta['date'][:10]}, commit {short}, torch {meta['versions']['torch']}, "
        f"{machine['cpu']}, {machine['cores']} cores.</sub>"
    )


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


def link_of(link_mbit: float | None) -> str:
    """A link for people."""
    return "unshaped" if link_mbit is None else f"{link_mbit:g} Mbit/s"


def with_spread(value: float | None, spread: float | None, digits: int, *, sign: str = "") -> str:
    """Mean and standard deviation, where there is one; sign: `+` shows it always."""
    if value is None:
        return "n/a"
    text = f"{value:{sign}.{digits}f}"
    return text if spread is None else f"{text} ± {spread:.{digits}f}"


def number(value: float | None, digits: int) -> str:
    """A number, or n/a."""
    return "n/a" if value is None else f"{value:,.{digits}f}"


def megabytes(count: float) -> str:
    """Bytes as MB (10^6), with more digits where there are few."""
    return f"{count / 1e6:.1f}" if count >= 1e6 else f"{count / 1e6:.2f}"


def yes(value: bool | None) -> str:
    """A truth value, or n/a."""
    return "n/a" if value is None else "yes" if value else "no"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escape(text: str) -> str:
    return text.replace("|", r"\|")
