"""From the samples of the step-time benchmark to its rows, and from the rows to its table.

What the columns mean is in `benchmarks/step_time/allreduce.py`.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.harness.launch import Layout
from benchmarks.harness.results import print_table, quantile
from benchmarks.step_time.rows import COMPUTE_ROW, DDP_ROW, FP16_ROW, GRADIENT_BYTES, split_row

TIME_COLUMNS = ("step ms", "p10", "p90")
LIMIT_COLUMNS = ("% of wire", "bound ms", "x fp32", "x fp16", "identical")


def summarize(
    samples_of: dict[str, list[dict[str, Any]]],
    *,
    layout: Layout,
    link_mbit: float | None,
    reasons: dict[str, str],
) -> list[dict[str, Any]]:
    """The samples of one link as rows of the JSON, one per codec.

    reasons: the rows that could not be measured, and why not. Bytes are those of the host that
    sends most, divided by the mean number of ranks: no share of a host with fewer or more ranks.
    """
    world_size = layout.world_size
    ranks_per_host = world_size / layout.hosts
    known = {
        "hosts": layout.hosts,
        "ranks_per_host": layout.ranks_per_host,
        "link_mbit": link_mbit,
    }
    allreduce_bytes = round(GRADIENT_BYTES * 2 * (world_size - 1) / world_size)
    steps_ms = {
        name: [sample["step_s"] * 1e3 for sample in samples] for name, samples in samples_of.items()
    }
    rows = []
    for name, samples in samples_of.items():
        step_ms = median(steps_ms[name])
        sent = zip(*(sample["tx_bytes"] for sample in samples), strict=True)
        host_bytes = max(median(of_host) for of_host in sent)
        added_ms = step_ms - median(steps_ms[COMPUTE_ROW])
        silent = name == COMPUTE_ROW
        raw_bytes, inter_bytes = samples[-1]["raw_bytes"], samples[-1]["inter_bytes"]
        counted_bytes = None
        if inter_bytes is None:
            raw_bytes = 0 if silent else allreduce_bytes
        else:
            counted_bytes = round(max(inter_bytes) / ranks_per_host)
        limit_pct = bound_ms = None
        if link_mbit is not None and not silent:
            wire_ms = host_bytes * 8 / (link_mbit * 1e3)
            bound_ms = step_ms - added_ms + wire_ms
            limit_pct = wire_ms / added_ms * 100 if added_ms > 0 else None
        rows.append(
            {
                "codec": name,
                **known,
                "rounds": len(samples),
                "step_ms_median": step_ms,
                "step_ms_p10": quantile(steps_ms[name], 0.1),
                "step_ms_p90": quantile(steps_ms[name], 0.9),
                "wire_bytes": round(host_bytes / ranks_per_host),
                "counted_wire_bytes": counted_bytes,
                "raw_bytes": raw_bytes,
                "wire_limit_pct": limit_pct,
                "bound_ms": bound_ms,
                "speedup_vs_fp32": median(steps_ms[DDP_ROW]) / step_ms,
                "speedup_vs_fp16": median(steps_ms[FP16_ROW]) / step_ms,
                "replicas_identical": None if silent else all(s["identical"] for s in samples),
                "reason": None,
            }
        )
    for name, reason in reasons.items():
        rows.append({**dict.fromkeys(rows[0]), **known, "codec": name, "reason": reason})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The rows of one link as a table; without those that have a reason instead of figures."""
    link = link_name(rows[0]["link_mbit"])
    measured = [row for row in rows if row["reason"] is None]
    print_table(
        f"{rows[0]['hosts']} hosts x {rows[0]['ranks_per_host']} ranks, {link}, "
        f"{rows[0]['rounds']} rounds",
        columns=("codec", *TIME_COLUMNS, "wire MB", "counted MB", "raw MB", *LIMIT_COLUMNS),
        rows=(
            (
                row["codec"],
                *time_cells(row),
                megabytes(row["wire_bytes"]),
                megabytes(row["counted_wire_bytes"]),
                megabytes(row["raw_bytes"]),
                *limit_cells(row),
            )
            for row in measured
        ),
    )


def time_cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """Of `TIME_COLUMNS`."""
    return row["step_ms_median"], row["step_ms_p10"], row["step_ms_p90"]


def limit_cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """Of `LIMIT_COLUMNS`."""
    return (
        row["wire_limit_pct"],
        row["bound_ms"],
        f"{row['speedup_vs_fp32']:.2f}",
        f"{row['speedup_vs_fp16']:.2f}",
        {True: "yes", False: "NO", None: None}[row["replicas_identical"]],
    )


def link_name(link_mbit: float | None) -> str:
    """A link for people."""
    return "unshaped" if link_mbit is None else f"{link_mbit:g} Mbit/s"


def megabytes(count: int | None) -> str | None:
    """Bytes for people."""
    return None if count is None else f"{count / 1e6:.2f}"


def summarize_forms(
    samples_of: dict[str, list[dict[str, Any]]],
    *,
    layout: Layout,
    link_mbit: float | None,
    reasons: dict[str, str],
) -> list[dict[str, Any]]:
    """The rows of the step-time benchmark with what only several ranks on a host bring."""
    rows = []
    for row in summarize(samples_of, layout=layout, link_mbit=link_mbit, reasons=reasons):
        form, codec = split_row(row["codec"])
        samples = samples_of.get(row["codec"], [])
        rows.append(
            {
                **row,
                "codec": codec,
                "form": form,
                "layout": layout.name,
                "intra_bytes": _of_host0(samples, "intra_bytes"),
                "inter_bytes": _of_host0(samples, "inter_bytes"),
                "lo_bytes": round(median(s["lo_bytes"] for s in samples)) if samples else None,
            }
        )
    return rows


def show_forms(rows: list[dict[str, Any]]) -> None:
    """The rows of one link as a table; without those that have a reason instead of figures."""
    measured = [row for row in rows if row["reason"] is None]
    print_table(
        f"{rows[0]['layout']}, {link_name(rows[0]['link_mbit'])}, {measured[0]['rounds']} rounds; "
        "MB of a step: a rank's to other hosts (interface), then host 0's by our counters and lo",
        columns=(
            *("codec", "form", *TIME_COLUMNS, "wire MB", "inter MB", "intra MB", "lo MB"),
            *LIMIT_COLUMNS,
        ),
        rows=(
            (
                row["codec"],
                row["form"],
                *time_cells(row),
                megabytes(row["wire_bytes"]),
                megabytes(row["inter_bytes"]),
                megabytes(row["intra_bytes"]),
                megabytes(row["lo_bytes"]),
                *limit_cells(row),
            )
            for row in measured
        ),
    )
    for row in rows:
        if row["reason"] is not None:
            print(f"{row['form']} {row['codec']}: {row['reason']}")


def _of_host0(samples: list[dict[str, Any]], key: str) -> int | None:
    """Of the last step: our counters say the same in every one of a fixed-size codec."""
    counted = samples[-1][key] if samples else None
    return None if counted is None else counted[0]
