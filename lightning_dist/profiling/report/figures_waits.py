"""Who waited when: ranks over steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dist.profiling.analysis.parts import Series, Summary
from lightning_dist.profiling.report.bins import FEW_BARS, Columns, columns, mean, most_frequent
from lightning_dist.profiling.report.figure import HEAT, axis, figure, legend_above
from lightning_dist.profiling.report.text import finite, label, why
from lightning_dist.profiling.report.view import Picture

_NAMED = 40
"""So many ranks have their name beside their row."""


def waits_over_time(summary: Summary) -> Picture:
    """Heat map of waiting, with a mark on the rank that was waited for."""
    title, short = "Waiting of every rank", "Waiting"
    series = summary.series
    if missing := _missing(summary):
        return Picture("waits", title, short, missing=missing)
    at = columns(series.steps)
    names = _names(summary)
    data = [_map(series, at, names)]
    caption = (
        "Darker is longer (lighter in the dark scheme): how long a rank waited for others, hidden "
        "or not. A slow rank is the row without waiting while others wait."
    )
    caption += at.gaps
    marks = _marks(series, at, names)
    if marks["x"]:
        data.append(marks)
        caption += " A circle is on the rank that most of the waiting was for."
    drawn = figure(
        data,
        height=120 + max(110, min(24 * len(names), 640)),
        xaxis=axis("step", showgrid=False, range=at.range),
        yaxis=axis(
            type="category", autorange="reversed", showgrid=False, nticks=min(len(names), _NAMED)
        ),
        legend=legend_above(),
    )
    return Picture("waits", title, short, caption, drawn)


def _missing(summary: Summary) -> str:
    series = summary.series
    if not series.steps or not series.wait_ms:
        return f"n/a: {why(summary, 'wait', 'step_ms')}."
    if len(series.wait_ms) == 1:
        return "There is one rank, and nobody it could wait for."
    if not any(finite(value) for values in series.wait_ms.values() for value in values):
        return "No rank has waited for another."
    return ""


def _names(summary: Summary) -> dict[int, str]:
    """Of the rows, by rank."""
    hosts = {each.rank: f" · {label(each.host)}" for each in summary.ranks}
    return {rank: f"rank {rank}{hosts.get(rank, '')}" for rank in sorted(summary.series.wait_ms)}


def _map(series: Series, at: Columns, names: Mapping[int, str]) -> dict[str, Any]:
    waits = [[mean(series.wait_ms[rank][run]) for run in at.runs] for rank in names]
    many = "" if at.width == 1 else "about "
    return {
        "type": "heatmap",
        "name": "waiting",
        "x": at.middles,
        "y": list(names.values()),
        "z": waits,
        "zmin": 0,
        "zmax": max(wait for row in waits for wait in row if wait is not None),
        "colorscale": HEAT,
        "hoverongaps": False,
        "xgap": 0 if len(at.runs) > FEW_BARS else 1,
        "ygap": 1,
        "colorbar": {"title": {"text": "ms"}, "thickness": 12, "outlinewidth": 0, "nticks": 5},
        "hovertemplate": f"%{{y}}<br>{many}step %{{x:.0f}}: waited %{{z:,.3~r}} ms<extra></extra>",
    }


def _marks(series: Series, at: Columns, names: Mapping[int, str]) -> dict[str, Any]:
    few = len(at.runs) <= FEW_BARS
    causes = [most_frequent(series.slowest[run]) for run in at.runs]
    marked = [
        (x, names[cause])
        for x, cause in zip(at.middles, causes, strict=True)
        if cause is not None and cause in names
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "the rank that most waiting was for",
        "showlegend": True,
        "x": [x for x, _ in marked],
        "y": [name for _, name in marked],
        "marker": {
            "symbol": "circle-open",
            "size": 8 if few else 3,
            "color": "--ink",
            "line": {"width": 1.5 if few else 1},
        },
        "hoverinfo": "skip",
    }
