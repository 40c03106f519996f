"""The rows of benchmarks/profiling.py in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.allreduce_summary import link_name
from benchmarks.report import print_table

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], Any]]

_DEVIATIONS: Columns = {
    "times": lambda row: row["count"],
    "median miss, ms": lambda row: f"{row['median_ms']:.2f}",
    "bias, ms": lambda row: f"{row['bias_ms']:+.2f}",
    "worst, ms": lambda row: f"{row['worst_ms']:+.2f}",
}
_KINDS: Mapping[str, tuple[str, Columns]] = {
    "skew": (
        "planted skew, and what waiting says",
        {
            "codec": lambda row: row["codec"],
            "planted, ms": lambda row: row["planted_ms"],
            **_DEVIATIONS,
        },
    ),
    "codec": (
        "planted time of a codec",
        {
            "planted, ms": lambda row: row["planted_ms"],
            "a step, ms": lambda row: row["known_ms"],
            **_DEVIATIONS,
        },
    ),
    "wire": (
        "planted rates of links",
        {
            "link": lambda row: link_name(row["link_mbit"]),
            "TCP": lambda row: row["congestion_control"],
            "codec": lambda row: row["codec"],
            "planted, Gbit/s": lambda row: f"{row['payload_gbps']:.4f}",
            "interface": lambda row: _range(row, "link_gbps", ".4f"),
            "of planted": lambda row: _range(row, "link_of_payload", ".1%"),
            "profile": lambda row: _range(row, "wire_gbps", ".4f"),
            "of interface": lambda row: _range(row, "of_link", ".1%"),
            "peak": lambda row: _range(row, "peak_gbps", ".4f"),
        },
    ),
    "clocks": (
        "offset of clocks that are one",
        {
            "load": lambda row: row["load"],
            "readings": lambda row: row["count"],
            "median, us": lambda row: row["median_us"],
            "worst, us": lambda row: row["worst_us"],
            "uncertainty, us": lambda row: row["uncertainty_us"],
            "within it": lambda row: f"{row['within']:.0%}",
        },
    ),
    "cost": (
        "a step with and without",
        {
            "codec": lambda row: row["codec"],
            "buckets": lambda row: row["buckets"],
            "step, ms": lambda row: row["step_ms"],
            "more, ms": lambda row: _spread(row, "step"),
            "CPU, ms": lambda row: row["cpu_ms"],
            "more CPU, ms": lambda row: _spread(row, "cpu"),
            "self-accounted": lambda row: f"{row['overhead']:.2%}",
            "in detail": lambda row: f"{row['detailed']:.0%}",
        },
    ),
    "hooks": (
        "a step with hooks in the place of DDP's own allreduce",
        {
            "hook": lambda row: row["hook"],
            "link": lambda row: link_name(row["link_mbit"]),
            "buckets": lambda row: row["buckets"],
            "step, ms": lambda row: row["step_ms"],
            "more, ms": lambda row: _spread(row, "step"),
            "CPU, ms": lambda row: row["cpu_ms"],
            "more CPU, ms": lambda row: _spread(row, "cpu"),
        },
    ),
    "outputs": (
        "files of a profile",
        {
            "ranks": lambda row: row["ranks"],
            "steps": lambda row: row["steps"],
            "lines, MB": lambda row: row["lines_mb"],
            "read, s": lambda row: f"{row['read_s']:.2f}",
            "summarize, s": lambda row: f"{row['summarize_s']:.2f}",
            "html, s": lambda row: f"{row['html_s']:.2f}",
            "html, MB": lambda row: row["html_mb"],
            "trace, s": lambda row: f"{row['trace_s']:.2f}",
            "trace, MB": lambda row: f"{row['trace_mb']:.2f}",
            "csv, s": lambda row: f"{row['csv_s']:.2f}",
        },
    ),
}


def show(rows: Sequence[Row]) -> None:
    """One table for each kind."""
    for kind in dict.fromkeys(row["kind"] for row in rows):
        title, columns = _KINDS[kind]
        of_kind = [row for row in rows if row["kind"] == kind]
        cells = [[cell(row) for cell in columns.values()] for row in of_kind]
        print_table(title, columns=list(columns), rows=cells)


def _range(row: Row, name: str, form: str) -> str:
    median, low, high = (format(row[f"{name}{part}"], form) for part in ("", "_low", "_high"))
    return f"{median} ({low}-{high})"


def _spread(row: Row, name: str) -> str:
    more, low, high = (row[f"{name}_more{part}_ms"] for part in ("", "_low", "_high"))
    return f"{more:+.2f} ({low:+.2f} to {high:+.2f})"
