"""The parts of the steps, one bar beside the other."""

from __future__ import annotations

from typing import Any

from lightning_dist.profiling.parts import PARTS, Series, Summary
from lightning_dist.profiling.report.bins import FEW_BARS, bins, ends, mean, middles
from lightning_dist.profiling.report.figure import axis, figure, fill, legend_above
from lightning_dist.profiling.report.text import why
from lightning_dist.profiling.report.view import Picture
from lightning_dist.profiling.report.words import PART_WORDS


def steps_over_time(summary: Summary) -> Picture:
    """Stacked bars, one per step or per run of steps."""
    series = summary.series
    title = "Steps over time"
    runs = bins(len(series.steps))
    data = [trace for name in PARTS if (trace := _trace(name, series, runs)) is not None]
    if not data:
        missing = f"n/a: {why(summary, 'parts_ms', 'step_ms')}."
        return Picture("steps", title, "Steps", missing=missing)
    longest = max(run.stop - run.start for run in runs)
    caption = "Mean over ranks, milliseconds; the four exposed parts are the cost of communication."
    if longest > 1:
        caption += f" Every bar is the mean of up to {longest} steps that follow each other."
    drawn = figure(
        data,
        height=440,
        barmode="stack",
        xaxis=axis("step", showgrid=False, range=ends(series.steps)),
        yaxis=axis("milliseconds per step", rangemode="tozero"),
        legend=legend_above(),
        hovermode="closest",
    )
    return Picture("steps", title, "Steps", caption, drawn)


def _trace(name: str, series: Series, runs: list[slice]) -> dict[str, Any] | None:
    values = series.parts_ms.get(name, ())
    heights = [mean(values[run]) for run in runs]
    if not any(heights):
        return None  # a name in the legend and nothing to see
    few = len(runs) <= FEW_BARS
    words = PART_WORDS[name]
    steps = series.steps
    many = "" if len(runs) == len(steps) else "about "
    return {
        "type": "bar",
        "name": words.name,
        "x": middles(steps, runs),
        "width": [(steps[run][-1] - steps[run][0] + 1) * (0.85 if few else 1) for run in runs],
        "y": heights,
        "marker": {**fill(name), "line": {"width": 0.5 if few else 0, "color": "--line"}},
        "hovertemplate": f"{many}step %{{x:.0f}}<br>{words.name}: %{{y:,.3~r}} ms<extra></extra>",
    }
