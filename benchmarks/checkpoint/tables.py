"""Tables of the cost of a save and of the campaign of crashes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.harness.tables import NA, Column, Result, Row, Rows, Table, caption, markdown


def checkpoint(result: Result) -> str | None:
    """Costs of a save, one line for every way to save; then the goals."""
    rows, meta = [row for row in result["rows"] if "stall_ms" in row], result["meta"]
    if not rows:
        return None
    text = (
        f"A state of {meta['state_mb']:.0f} MB in 96 tensors, medians of {rows[0]['rounds']} "
        "interleaved rounds, one thread, local disk. Training blocked: by the call, and by the "
        "delay of the next optimizer step. Slowdown: of small training steps during the write. "
        "Memory: of all processes."
    )
    return "\n\n".join(
        [markdown(_SAVES, rows), markdown(_GOALS, meta["goals"]), caption(text, meta)]
    )


def _counts(rows: Rows) -> list[Column]:
    names = [name for name, value in rows[0].items() if isinstance(value, int)]
    return [("", "{kind}"), *((name, f"{{{name}:,}}") for name in names)]


CRASH_CAMPAIGN = Table(
    columns=_counts,
    text=lambda meta, rows: (
        "After every trial: the newest checkpoint that was reported complete, or a later one, is "
        "found and whole; damaged ones are detected; files of others are as they were; a resumed "
        "training ends with the same bits as one that was not disturbed. A trial counts under "
        f"every problem it had. {meta['seconds'] / 60:.0f} minutes, seed {meta['seed']}."
    ),
)


def _figure(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return NA
    number = value["median"]
    return f"{number:,.1f} ms" if number < 100 else f"{number:,.0f} ms"


def _stall(row: Row) -> str:
    held = row["held_ms"]
    return _figure(row["stall_ms"]) + (f" + {_figure(held)}" if held else "")


def _way(row: Row) -> str:
    ours = row["row"].removeprefix("ours ")
    return row["row"] if ours == row["row"] else f"ours, `{ours}`"


def _goal(goal: Row, *, key: str) -> str:
    return f"{goal[key]:.2f}{'' if goal['unit'] in 'x%' else ' '}{goal['unit']}"


_SAVES: list[Column] = [
    ("", _way),
    ("training blocked", _stall),
    ("complete after", lambda row: _figure(row["total_ms"])),
    ("slowdown", "{slowdown_pct[median]:+.1f} %"),
    ("memory", "{memory_mb:,.0f} MB"),
]


_GOALS: list[Column] = [
    ("goal", "{name}"),
    ("measured", partial(_goal, key="measured")),
    ("at most", partial(_goal, key="goal")),
    ("", lambda goal: "met" if goal["met"] else "missed"),
]


_COMPARED = ("memcpy_ms", "alone_ms", "rank0_ms", "rank1_ms", "over_memcpy", "over_alone")


RANKS = Table(
    has="over_memcpy",
    columns=[
        ("", "{row}"),
        *((key, f"{{{key}[median]:.2f}} ({{{key}[min]:.2f}})") for key in _COMPARED),
    ],
    text="Stalls of two ranks that save together, beside one that copies or saves alone: median "
    "and least.",
)
