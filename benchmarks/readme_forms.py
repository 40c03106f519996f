"""The table of the hierarchical benchmark as Markdown: one for every layout."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.layouts import Layout
from benchmarks.readme_markdown import (
    Result,
    Row,
    caption,
    link_of,
    megabytes,
    name_of,
    number,
    table,
)


def forms(result: Result, *, layouts: Sequence[str] = ()) -> str | None:
    """Step times by form and codec; layouts: only these."""
    rows = [row for row in result["rows"] if row["reason"] is None]
    found = [name for name in dict.fromkeys(row["layout"] for row in rows)]
    tables = [_of_layout(rows, name) for name in found if not layouts or name in layouts]
    if not tables:
        return None
    text = (
        "Median step of 10 x Linear(1024, 1024), 42 MB of gradients; MB that a host sends to "
        "others (interface) and to itself (loopback) in a step; % of the link: bytes over the "
        "link's rate, by the time that communication adds to the step. All ranks share two cores."
    )
    return "\n\n".join([*tables, caption(text, result)])


def _of_layout(rows: Sequence[Row], layout: str) -> str:
    of_layout = [row for row in rows if row["layout"] == layout]
    links = sorted({row["link_mbit"] for row in of_layout}, key=lambda mbit: mbit or float("inf"))
    shape = Layout.parse(layout)
    heads = [shape.title, "MB to others", "MB inside"]
    for link in links:
        heads += [f"{link_of(link)}: step", "faster than fp32 / fp16 hook", "% of the link"]
    lines = []
    for form, codec in dict.fromkeys((row["form"], row["codec"]) for row in of_layout):
        of_link = {
            row["link_mbit"]: row
            for row in of_layout
            if (row["form"], row["codec"]) == (form, codec)
        }
        first = next(iter(of_link.values()))
        name = name_of(codec) if form is None else f"{form} `{codec}`"
        mean_ranks = shape.world_size / shape.hosts
        cells = [name, megabytes(first["wire_bytes"] * mean_ranks), megabytes(first["lo_bytes"])]
        for link in links:
            row = of_link[link]
            silent = codec == "no-comm"
            faster = f"{row['speedup_vs_fp32']:.2f}x / {row['speedup_vs_fp16']:.2f}x"
            cells += [
                f"{row['step_ms_median']:,.0f} ms",
                "n/a" if silent else faster,
                number(row["wire_limit_pct"], 0),
            ]
        lines.append(cells)
    return table(heads, lines)
