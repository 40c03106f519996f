"""Tables of final losses and of the time to fp32 DDP's loss."""

from __future__ import annotations

from functools import partial

from benchmarks.harness.tables import (
    NA,
    Column,
    Result,
    Row,
    Table,
    caption,
    markdown,
    of_link,
    pivot,
    reasons,
)


def convergence(result: Result, *, task: str) -> str | None:
    """One table for each metric of the task: where each codec ends, and how far from fp32 DDP."""
    rows = [row for row in result["rows"] if row["task"] == task]
    metrics = list(next((row["metrics"] for row in rows if row["metrics"]), {}))
    if not metrics:
        return None
    tables = []
    for metric in metrics:
        name = metric.replace("_", " ")
        columns: list[Column] = [(name, "{row!n}"), ("times fewer bytes", "{bytes_ratio:,.1f}")]
        for ranks in sorted({row["ranks"] for row in rows}):
            columns.append((f"{ranks} ranks", partial(_end, metric=metric), ranks))
            columns.append(("difference to `ddp`, %", partial(_off, metric=metric), ranks))
        of_rows = [row for row in rows if row["metrics"]]
        tables.append(markdown(columns, pivot(of_rows, of=["row"], by="ranks")))
    given = result["meta"]["arguments"]
    words = {"steps": " of {} steps", "batch": ", batches of {}", "lr": ", learning rate {:g}"}
    chosen = [word.format(given[name]) for name, word in words.items() if given.get(name)]
    text = (
        f"Task `{task}`{''.join(chosen)}, {max(len(row['seeds']) for row in rows)} seeds: mean and "
        "standard deviation after the last step; difference to fp32 DDP with the same seed, mean "
        "and standard deviation. =: the mean difference is within DDP's own standard deviation "
        "over seeds."
    )
    return "\n\n".join([*tables, *reasons(rows), caption(text, result["meta"])])


def _reached(row: Row, *, key: str, unit: str) -> str:
    missing = NA if row["row"] == "no-comm" else "not reached"  # it has no target
    return missing if row[key] is None else f"{row[key]:,.0f}{unit}"


TIME_TO_ACCURACY = Table(
    has="step_ms",
    columns=[
        ("", "{row!n}"),
        ("step", "{step_ms:,.0f} ms"),
        ("MB sent per step", "{wire_bytes_per_step!b}"),
        ("steps to target", partial(_reached, key="steps_to_target", unit="")),
        ("time to target", partial(_reached, key="seconds_to_target", unit=" s")),
        ("speedup vs fp32", "{speedup_vs_fp32:.2f}x"),
        ("vs fp16 hook", "{speedup_vs_fp16:.2f}x"),
    ],
    with_reasons=True,
    text=lambda meta, rows: (
        f"Byte-level GPT on 2 nodes, {of_link(meta['arguments']['link'])}: training time until the "
        "validation loss is what fp32 DDP reaches; means over seeds. Communication is "
        f"{meta['communication_share_pct']:.0f} % of fp32 DDP's step."
    ),
)


def _with_spread(value: float | None, spread: float | None, form: str) -> str:
    if value is None:
        return NA
    return f"{value:{form}}" if spread is None else f"{value:{form}} ± {spread:{form.lstrip('+')}}"


def _end(row: Row, *, metric: str) -> str:
    value = row["metrics"].get(metric, {})
    return _with_spread(value.get("mean"), value.get("std"), ".3f")


def _off(row: Row, *, metric: str) -> str:
    if row["row"] == "ddp":
        return NA
    value = row["metrics"].get(metric, {})
    same = " =" if value.get("within_ddp_spread") else ""
    return _with_spread(value.get("diff_pct_of_ddp"), value.get("diff_pct_std"), "+.2f") + same
