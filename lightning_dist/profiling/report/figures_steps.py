"""The parts of the steps, one bar beside the other."""

from __future__ import annotations

from typing import Any

from lightning_dist.profiling.analysis.parts import PARTS, Series, Summary
from lightning_dist.profiling.report.bins import FEW_BARS, Columns, columns, mean
from lightning_dist.profiling.report.figure import axis, figure, fill, legend_above
from lightning_dist.profiling.report.text import why
from lightning_dist.profiling.report.view import Picture
from lightning_dist.profiling.report.words import PART_WORDS


def steps_over_time(summary: Summary) -> Picture:
    """Stacked bars, one per step or per run of steps."""
    series = summary.series
    title = "Steps over time"
    at = columns(series.steps) if series.steps else None
    data = [trace for name in PARTS if at and (trace := _trace(name, series, at)) is not None]
    if at is None or not data:
        missing = f"n/a: {why(summary, 'parts_ms', 'step_ms')}."
        return Picture("steps", title, "Steps", missing=missing)
    caption = "Mean over ranks, milliseconds; the four exposed parts are the cost of communication."
    if at.width > 1:
        caption += f" Every bar is the mean of up to {at.width} steps that follow each other."
    caption += at.gaps
    drawn = figure(
        data,
        height=440,
        barmode="stack",
        xaxis=axis("step", showgrid=False, range=at.range),
        yaxis=axis("milliseconds per step", rangemode="tozero"),
        legend=legend_above(),
        hovermode="closest",
    )
    return Picture("steps", title, "Steps", caption, drawn)


def _trace(name: str, series: Series, at: Columns) -> dict[str, Any] | None:
    values = series.parts_ms.get(name, ())
    heights = {
        x: mean(values[run])
        for x, run in zip(at.middles, at.runs, strict=True)
        if run.start < run.stop
    }
    if not any(heights.values()):
        return None  # a name in the legend and nothing to see
    few = len(at.runs) <= FEW_BARS
    words = PART_WORDS[name]
    many = "" if at.width == 1 else "about "
    return {
        "type": "bar",
        "name": words.name,
        "x": list(heights),
        "width": at.width * (0.85 if few else 1),
        "y": list(heights.values()),
        "marker": {**fill(name), "line": {"width": 0.5 if few else 0, "color": "--line"}},
        "hovertemplate": f"{many}step %{{x:.0f}}<br>{words.name}: %{{y:,.3~r}} ms<extra></extra>",
    }
