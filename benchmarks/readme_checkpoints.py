"""The tables about checkpoints: what they cost, and what was done to break them."""

from __future__ import annotations

from typing import Any

from benchmarks.readme_markdown import Result, Row, caption, number, table


def checkpoint(result: Result) -> str | None:
    """Costs of a save, one line for every way to save; then the goals."""
    rows = [row for row in result["rows"] if "stall_ms" in row]
    if not rows:
        return None
    heads = ["", "training stands still", "complete after", "steps meanwhile", "memory"]
    lines = [
        [
            _name(row["row"]),
            _stall(row),
            f"{_median(row['total_ms'])} ms",
            "n/a" if row["slowdown_pct"] is None else f"{row['slowdown_pct']['median']:+.1f} %",
            "n/a" if row["memory_mb"] is None else f"{number(row['memory_mb'], 0)} MB",
        ]
        for row in rows
    ]
    goals = [
        [goal["name"], _with_unit(goal, "measured"), _with_unit(goal, "goal"), _met(goal)]
        for goal in result["meta"]["goals"]
    ]
    text = (
        f"A state of {result['meta']['state_mb']:.0f} MB in 96 tensors, medians of "
        f"{rows[0]['rounds']} interleaved rounds, one thread, local disk. Standing still: the "
        "call, and what the next optimizer step was held back. Steps meanwhile: how much longer "
        "small training steps take while it is written. Memory: of all processes."
    )
    return "\n\n".join(
        [
            table(heads, lines),
            table(["goal", "measured", "at most", ""], goals),
            caption(text, result),
        ]
    )


def crash_campaign(result: Result) -> str | None:
    """What was done to checkpoints, how often, and what went wrong."""
    rows = result["rows"]
    if not rows:
        return None
    problems = [key for key, value in rows[0].items() if isinstance(value, int) and key != "trials"]
    heads = ["", "trials", *problems]
    lines = [[row["kind"], *(f"{row[key]:,}" for key in heads[1:])] for row in rows]
    text = (
        "After every trial: the newest checkpoint that was reported complete, or a later one, is "
        "found and whole; damaged ones are detected; files of others are as they were; a resumed "
        "training ends with the same bits as one that was not disturbed. A trial counts under "
        f"every problem it had. {result['meta']['seconds'] / 60:.0f} minutes, seed "
        f"{result['meta']['seed']}."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


def _name(row: str) -> str:
    ours = row.removeprefix("ours ")
    return row if ours == row else f"ours, `{ours}`"


def _stall(row: Row) -> str:
    held = row["held_ms"]
    text = f"{_median(row['stall_ms'])} ms"
    return text if held is None else f"{text} + {_median(held)} ms"


def _median(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return "n/a"
    value = figure["median"]
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _with_unit(goal: dict[str, Any], key: str) -> str:
    return f"{goal[key]:.2f}{'' if goal['unit'] in 'x%' else ' '}{goal['unit']}"


def _met(goal: dict[str, Any]) -> str:
    return "met" if goal["met"] else "missed"
