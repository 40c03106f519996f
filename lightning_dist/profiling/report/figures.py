"""Figures of the page. Imports plotly, so only the page imports this."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from lightning_dist.profiling.analysis.metrics import METRICS, finite
from lightning_dist.profiling.analysis.parts import PARTS, Summary
from lightning_dist.profiling.report.tables import View, missing

_LOOKS = {
    "between_steps": ("#f0e442", ""),
    "forward": ("#56b4e9", ""),
    "backward": ("#0072b2", ""),
    "optimizer": ("#009e73", ""),
    "wait": ("#d55e00", "/"),
    "exposed_wait": ("#d55e00", "/"),
    "transfer": ("#e69f00", ""),
    "exposed_transfer": ("#e69f00", ""),
    "encode": ("#cc79a7", "x"),
    "decode": ("#cc79a7", "."),
    "exposed_codec": ("#cc79a7", "x"),
    "exposed_other": ("#8c8c8c", "."),
    "other": ("#c4c8ce", ""),
}
"""Colours of Okabe and Ito, which colour-blind people can tell apart, and patterns beside them."""


_LINE = "rgba(128,128,128,0.5)"
_AXIS = {
    **{"automargin": True, "zeroline": False, "title": {"standoff": 10}},
    **{"linecolor": _LINE, "gridcolor": "rgba(128,128,128,0.2)"},
}
_PATTERN = {"fillmode": "overlay", "fgcolor": "#14171c", "fgopacity": 0.75, "size": 6}
_TEMPLATE = {
    "layout": {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "hoverlabel": {"align": "left"},
        "hovermode": "closest",
        "hoverdistance": 30,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    },
    "data": {
        "bar": [{"marker": {"line": {"color": _LINE, "width": 0}, "pattern": _PATTERN}}],
        "heatmap": [{"colorscale": "Cividis", "colorbar": {"thickness": 12, "outlinewidth": 0}}],
    },
}
"""Look of all figures, light and dark; the page adds the colour of its text."""

HOVER = "%{hovertext}<extra></extra>"
_MOST_NAMES = 40
_LONGEST_NAME = 24


def steps_over_time(summary: Summary) -> View:
    """Stacked bars of the parts, one for each detailed step."""
    parts, bars = summary.per_step.breakdown_ms, []
    for name in (name for name in PARTS if any(map(finite, parts.get(name, ())))):
        label = METRICS[name].label
        bar = go.Bar(
            name=label,
            x=list(summary.per_step.steps),
            y=list(parts[name]),
            marker=fill(name),
            hovertemplate=f"step %{{x}}<br>{label}: %{{y:,.3~r}} ms<extra></extra>",
        )
        bars.append(bar)
    title = "Steps over time"
    if not bars:
        return View("steps", title, missing=missing(summary, "breakdown_ms", "step_ms"))
    caption = (
        "Mean over ranks, of each step that was recorded in detail. The four exposed parts are the "
        "cost of communication."
    )
    y_axis = {"title": "ms per step", "rangemode": "tozero"}
    drawn = styled(bars, 440, barmode="stack", bargap=0.1, xaxis=_steps_axis(summary), yaxis=y_axis)
    return View("steps", title, caption, figures={"": drawn})


def waits_over_time(summary: Summary) -> View:
    """Heat map of waiting by rank and step, with a mark on the rank that was waited for."""
    per_step, title = summary.per_step, "Waiting by rank and step"
    waits = dict(sorted(per_step.wait_ms.items()))
    longest = max((finite(each) or 0 for of_rank in waits.values() for each in of_rank), default=0)
    if not per_step.steps or not waits:
        return View("waits", title, missing=missing(summary, "exposed_wait", "step_ms"))
    if len(waits) == 1:
        return View("waits", title, missing="There is one rank, and nobody it could wait for.")
    if not longest:
        return View("waits", title, missing="No rank has waited for another.")
    hosts = {each.rank: f" · {short(each.host)}" for each in summary.ranks}
    names = {rank: f"rank {rank}{hosts.get(rank, '')}" for rank in waits}
    heat = go.Heatmap(
        x=list(per_step.steps),
        y=list(names.values()),
        z=list(map(list, waits.values())),
        zmin=0,
        zmax=longest,
        ygap=1,
        colorbar={"title": {"text": "ms"}},
        hovertemplate="%{y}<br>step %{x}: wait %{z:,.3~r} ms<extra></extra>",
    )
    marks = go.Scatter(
        mode="markers",
        name="rank that most waiting was for",
        showlegend=True,
        x=list(per_step.steps),
        y=[None if rank is None else names.get(rank) for rank in per_step.slowest],
        marker={"symbol": "circle-open", "size": 5, "color": _LOOKS["wait"][0]},
        hoverinfo="skip",
    )
    ticks = {"type": "category", "nticks": min(len(names), _MOST_NAMES)}
    y_axis = {"autorange": "reversed", "showgrid": False, **ticks}
    caption = (
        "How long each rank waited for others, hidden or exposed. A slow rank is a row without "
        "waiting while others wait."
    )
    height = 120 + max(110, min(24 * len(names), 640))
    drawn = styled([heat, marks], height, xaxis=_steps_axis(summary), yaxis=y_axis)
    return View("waits", title, caption, figures={"": drawn})


def _steps_axis(summary: Summary) -> dict[str, Any]:
    """The numbers of the detailed steps, one beside the other."""
    ends = [-0.5, len(summary.per_step.steps) - 0.5]
    return {"title": "step", "type": "category", "range": ends, "showgrid": False, "nticks": 20}


def fill(name: str) -> dict[str, Any]:
    """Colour of a bar, with the pattern that goes with it."""
    color, shape = _LOOKS.get(name, _LOOKS["other"])
    return {"color": color, "pattern": {"shape": shape}}


def styled(drawn: go.Figure | Sequence[Any], height: int, **layout: Any) -> go.Figure:
    """A figure of the page. Its tools stand in the right margin, over nothing."""
    figure = go.Figure(drawn)
    has_scale = any(isinstance(each, go.Heatmap) for each in figure.data)
    return figure.update_layout(
        template=_TEMPLATE,
        height=height,
        margin={"l": 60, "r": 16 if has_scale else 44, "t": 16, "b": 48},
        modebar={"orientation": "h" if has_scale else "v", "bgcolor": "rgba(0,0,0,0)"},
        uirevision="keep",
        **layout,
    )


def plain(text: Any) -> str:
    """Text of the run without tags, which plotly would read."""
    return html.escape(str(text), quote=False)


def short(text: str) -> str:
    """Text of the run with a limited length, without tags."""
    return plain(text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…")
