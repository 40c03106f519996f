"""The tables of the documents as Markdown, each from one JSON of the benchmarks.

What the figures mean is in the benchmark that measured them. A function returns None where the
results have no rows for its table.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.readme_markdown import (
    Result,
    Row,
    caption,
    link_of,
    megabytes,
    name_of,
    number,
    reasons,
    table,
    with_spread,
    yes,
)


def step_times(result: Result, *, hosts: int) -> str | None:
    """Time of a step and bytes per codec: a column pair for every link, slowest link first."""
    rows = [row for row in result["rows"] if row["hosts"] == hosts]
    measured = [row for row in rows if row.get("reason") is None]
    if not measured:
        return None
    links = sorted(
        {row["link_mbit"] for row in measured},
        key=lambda mbit: float("inf") if mbit is None else mbit,
    )
    heads = [f"{hosts} hosts", "MB sent"]
    for link in links:
        heads += [f"{link_of(link)}: step", "faster than fp32 / fp16 hook"]
    lines = []
    for codec in dict.fromkeys(row["codec"] for row in measured):
        of_link = {row["link_mbit"]: row for row in measured if row["codec"] == codec}
        sent = of_link[next(link for link in links if link in of_link)]["wire_bytes"]
        cells = [name_of(codec), megabytes(sent)]
        for link in links:
            row = of_link.get(link, {})
            cells.append(f"{row['step_ms_median']:,.0f} ms" if row else "n/a")
            if not row or codec == "no-comm":
                cells.append("n/a")
                continue
            cells.append(f"{row['speedup_vs_fp32']:.2f}x / {row['speedup_vs_fp16']:.2f}x")
        lines.append(cells)
    text = (
        f"Median step of 10 x Linear(1024, 1024), 42 MB of gradients, {hosts} hosts x "
        f"{rows[0]['ranks_per_host']} ranks; MB sent per rank and step, over the slowest of these "
        f"links. Codecs with their default options.{_rounds(measured, links)}"
    )
    return "\n\n".join([table(heads, lines), *reasons(rows), caption(text, result)])


def kernels(result: Result) -> str | None:
    """Speed of encode and settle beside a copy; fused kernels, where a codec has them."""
    rows = [row for row in result["rows"] if "mode" in row]
    fused = {(row["codec"], row["error_feedback"]) for row in rows if row["mode"] == "fused"}
    rows = [
        row
        for row in rows
        if row["mode"] == "fused" or (row["codec"], row["error_feedback"]) not in fused
    ]
    if not rows:
        return None
    heads = ["codec", "error feedback", "kernels", "encode, GB/s", "% of copy"]
    heads += ["decode and commit, GB/s", "% of copy", "both, % of copy"]
    lines = []
    for row in rows:
        cells = [f"`{row['codec']}`", yes(row["error_feedback"]), row["mode"]]
        for name in ("encode", "settle"):
            cells += [number(row[f"{name}_gb_s"], 1), number(row[f"{name}_limit_pct"], 0)]
        lines.append([*cells, number(row["limit_pct"], 0)])
    copy = rows[0]["copy_gb_s"]
    text = (
        f"GB of fp32 gradient per second of one thread's CPU time; a copy makes {copy:.1f} GB/s. "
        "% of copy: of the rate at which a copy moves the bytes that the pass has to touch."
    )
    return f"{table(heads, lines)}\n\n{caption(text, result)}"


def memory(result: Result) -> str | None:
    """What the reducer holds."""
    rows = [row for row in result["rows"] if "residual_bytes_per_element" in row]
    if not rows:
        return None
    heads = ["ranks", "residual, bytes per element", "payload buffers, bytes per element"]
    heads += ["resident set after warm-up", "at the end", "steps"]
    lines = [
        [
            str(row["world_size"]),
            number(row["residual_bytes_per_element"], 1),
            number(row["buffer_bytes_per_element"], 1),
            f"{row['resident_mb_warm']:.0f} MB",
            f"{row['resident_mb_end']:.0f} MB",
            f"{row['steps']:,}",
        ]
        for row in rows
    ]
    return f"{table(heads, lines)}\n\n{caption('Memory of one rank.', result)}"


def convergence(result: Result, *, task: str) -> str | None:
    """One table for each metric of the task: where each codec ends, and how far from fp32 DDP."""
    rows = [row for row in result["rows"] if row["task"] == task]
    metrics = list(next((row["metrics"] for row in rows if row["metrics"]), {}))
    if not metrics:
        return None
    worlds = sorted({row["ranks"] for row in rows})
    parts = [_metric_table(rows, metric, worlds=worlds) for metric in metrics]
    seeds = max(len(row["seeds"]) for row in rows)
    steps = result["meta"]["arguments"].get("steps")
    length = f" of {steps} steps" if steps else ""
    text = (
        f"Task `{task}`{length}, {seeds} seeds: mean and standard deviation after the last step; "
        "difference to fp32 DDP with the same seed, mean and standard deviation. =: the mean "
        "difference is within DDP's own standard deviation over seeds."
    )
    return "\n\n".join([*parts, *reasons(rows), caption(text, result)])


def time_to_accuracy(result: Result) -> str | None:
    """How long until the loss is as low as fp32 DDP's."""
    rows = [row for row in result["rows"] if row["step_ms"] is not None]
    if not rows:
        return None
    heads = ["", "step", "MB sent per step", "steps to target", "time to target"]
    heads += ["faster than fp32 / fp16 hook"]
    lines = []
    for row in rows:
        seconds, steps = row["seconds_to_target"], row["steps_to_target"]
        missing = "n/a" if row["row"] == "no-comm" else "not reached"  # it has no target
        faster = row["speedup_vs_fp32"], row["speedup_vs_fp16"]
        lines.append(
            [
                name_of(row["row"]),
                f"{row['step_ms']:,.0f} ms",
                megabytes(row["wire_bytes_per_step"]),
                missing if steps is None else f"{steps:,.0f}",
                missing if seconds is None else f"{seconds:,.0f} s",
                " / ".join("n/a" if value is None else f"{value:.2f}x" for value in faster),
            ]
        )
    link = link_of(result["meta"]["arguments"]["link"])
    text = (
        f"Byte-level GPT on 2 hosts, {link}: training time until the validation loss is what fp32 "
        "DDP reaches; means over seeds."
    )
    if share := result["meta"].get("communication_share_pct"):
        text += f" Communication is {share:.0f} % of fp32 DDP's step."
    return "\n\n".join([table(heads, lines), *reasons(result["rows"]), caption(text, result)])


def _metric_table(rows: Sequence[Row], metric: str, *, worlds: Sequence[int]) -> str:
    heads = [metric.replace("_", " "), "times fewer bytes"]
    for ranks in worlds:
        heads += [f"{ranks} ranks", "difference to `ddp`, %"]
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        of_world = {row["ranks"]: row for row in rows if row["row"] == name and row["metrics"]}
        if not of_world:
            continue
        first = next(iter(of_world.values()))
        cells = [name_of(name), number(first["bytes_ratio"], 1)]
        for ranks in worlds:
            value = of_world[ranks]["metrics"].get(metric, {}) if ranks in of_world else {}
            cells.append(with_spread(value.get("mean"), value.get("std"), 3))
            if first["codec"] == "ddp":
                cells.append("n/a")
                continue
            same = " =" if value.get("within_ddp_spread") else ""
            difference = with_spread(
                value.get("diff_pct_of_ddp"), value.get("diff_pct_std"), 2, sign="+"
            )
            cells.append(difference + same)
        lines.append(cells)
    return table(heads, lines)


def _rounds(rows: Sequence[Row], links: Sequence[float | None]) -> str:
    """How many timed steps the medians are of; older results do not say."""
    rounds = {row["link_mbit"]: row.get("rounds") for row in rows}
    if None in rounds.values():
        return ""
    of_link = ", ".join(f"{rounds[link]} at {link_of(link)}" for link in links)
    return f" Timed steps: {of_link}."
