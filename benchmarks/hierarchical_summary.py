"""From the samples of the hierarchical benchmark to its rows, and from the rows to its table.

What the columns mean is in `benchmarks/hierarchical.py`.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.allreduce_summary import (
    LIMIT_COLUMNS,
    TIME_COLUMNS,
    limit_cells,
    link_name,
    megabytes,
    summarize,
    time_cells,
)
from benchmarks.hierarchical_settings import split_row
from benchmarks.layouts import Layout
from benchmarks.report import print_table


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
