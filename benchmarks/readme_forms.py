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


def forms(result: Result) -> str | None:
    """Step times by form and codec."""
    rows = [row for row in result["rows"] if row["reason"] is None]
    tables = [_of_layout(rows, name) for name in dict.fromkeys(row["layout"] for row in rows)]
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


def curve(result: Result) -> str | None:
    """What the cost model says of more hosts."""
    rows = [row for row in result["rows"] if row["kind"] == "prediction"]
    if not rows:
        return None
    kinds = list(dict.fromkeys((row["form"], row["codec"]) for row in rows))
    heads = ["PREDICTION: hosts", *(f"{form} `{codec}`" for form, codec in kinds)]
    lines = []
    for hosts in dict.fromkeys(row["hosts"] for row in rows):
        of_kind = {(row["form"], row["codec"]): row for row in rows if row["hosts"] == hosts}
        found = [of_kind[kind] for kind in kinds]
        cells = [f"{r['predicted_ms']:,.0f} ms ({r['speedup_vs_flat_fp32']:.1f}x)" for r in found]
        lines.append([f"{hosts:,}", *cells])
    meta, errors = result["meta"], result["meta"]["errors"]
    text = (
        f"{meta['label']}: communication of a step of 42 MB, {rows[0]['ranks_per_host']} ranks per "
        f"host, {rows[0]['gbit']:g} Gbit/s per host, this machine's loopback inside and its CPUs "
        f"for the codecs, {rows[0]['round_us']:.0f} us per round between hosts (too few ranks to "
        f"tell). Error of the fit over {errors['rows']} measured rows: median "
        f"{errors['median'] * 100:.1f} %, largest {errors['largest'] * 100:.0f} %."
    )
    return f"{table(heads, lines)}\n\n<sub>{text}</sub>"
