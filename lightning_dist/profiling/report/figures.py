"""Figures of the page. Imports plotly, so only the page imports this.

Colours are those of the light scheme; the page replaces them by :data:`DARK` in the dark one.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lightning_dist.profiling.analysis.metrics import METRICS, finite, format_value, why
from lightning_dist.profiling.analysis.parts import PARTS, PerStep, Summary
from lightning_dist.profiling.report.bins import (
    FEW_BARS,
    Columns,
    columns,
    digits,
    mean,
    most_frequent,
)
from lightning_dist.profiling.report.tables import PREDICTED
from lightning_dist.profiling.whatif.predictions import name_of

INK, LINE, GRID, RAISED = "#1b1f24", "#c9ced6", "#e6e8ec", "#f5f6f8"
COLORS = {  # Okabe and Ito's, which colour-blind people can tell apart
    **{
        "between_steps": "#f0e442",
        "forward": "#56b4e9",
        "backward": "#0072b2",
        "optimizer": "#009e73",
    },
    **dict.fromkeys(("wait", "exposed_wait"), "#d55e00"),
    **dict.fromkeys(("transfer", "exposed_transfer"), "#e69f00"),
    **{"exposed_other": "#8c8c8c", "other": "#c4c8ce"},
    **dict.fromkeys(("exposed_codec", "encode", "decode"), "#cc79a7"),
}
HEAT = [[0, "#e3eaf2"], [0.25, "#9ecbea"], [0.6, "#2b7bba"], [1, "#08306b"]]
DARK = {
    **{INK: "#e8eaed", LINE: "#434b57", GRID: "#2a3038", RAISED: "#1e232a"},
    **{"#0072b2": "#2a86c4", "#8c8c8c": "#a6a6a6", "#c4c8ce": "#5c6572"},
    **{"#e3eaf2": "#27303b", "#9ecbea": "#1f4f7d", "#2b7bba": "#4a9bd4", "#08306b": "#d6ecfb"},
}
"""Colour of the dark scheme by that of the light one; others are in both."""

_PATTERNS = {
    "wait": "/",
    "exposed_wait": "/",
    "exposed_codec": "x",
    "exposed_other": ".",
    "encode": "x",
    "decode": ".",
}
"""Beside the colours, for those who see them alike."""

_AXIS = {"automargin": True, "linecolor": LINE, "zeroline": False, "gridcolor": GRID}
_LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_TEMPLATE = {
    "layout": {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": _FONT, "size": 13, "color": INK},
        "hoverlabel": {"bgcolor": RAISED, "bordercolor": LINE, "align": "left"},
        "hovermode": "closest",
        "hoverdistance": 30,
        "legend": {**_LEGEND, "traceorder": "normal"},
        "xaxis": {**_AXIS, "title": {"standoff": 10}},
        "yaxis": {**_AXIS, "title": {"standoff": 10}},
    }
}
_COLORBAR = {"thickness": 12, "outlinewidth": 0, "nticks": 5}
HOVER = "%{hovertext}<extra></extra>"
_MOST_RANKS = 16
_MOST_NAMES = 40
_LONGEST_LABEL = 24


@dataclass(frozen=True)
class Picture:
    """Figures by the name of the choice between them, or a sentence that says why there is none."""

    id: str
    title: str
    caption: str = ""
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    missing: str = ""


def steps_over_time(summary: Summary) -> Picture:
    """Stacked bars of the parts, one per step or per run of steps."""
    per_step, title = summary.per_step, "Steps over time"
    at = columns(per_step.steps) if per_step.steps else None
    bars = [bar for name in PARTS if at and (bar := _part(name, per_step, at)) is not None]
    if at is None or not bars:
        missing = f"n/a: {why(summary.unavailable, 'breakdown_ms', 'step_ms')}."
        return Picture("steps", title, missing=missing)
    caption = "Mean over ranks. The four exposed parts are the cost of communication."
    if at.width > 1:
        caption += f" Each bar is the mean of up to {at.width} consecutive steps."
    axes = {"xaxis": {"title": "step", "showgrid": False, "range": at.range}}
    axes["yaxis"] = {"title": "ms per step", "rangemode": "tozero"}
    drawn = styled(go.Figure(bars), 440, barmode="stack", **axes)
    return Picture("steps", title, caption + at.gaps, {"": drawn})


def _part(name: str, per_step: PerStep, at: Columns) -> go.Bar | None:
    values = per_step.breakdown_ms.get(name, ())
    means = [mean(values[run]) if run.start < run.stop else None for run in at.runs]
    known = {x: value for x, value in zip(at.middles, means, strict=True) if value is not None}
    if not any(known.values()):
        return None  # a name in the legend and nothing to see
    is_few, label = len(at.runs) <= FEW_BARS, METRICS[name].label
    return go.Bar(
        name=label,
        x=list(known),
        y=list(known.values()),
        width=at.width * (0.85 if is_few else 1),
        marker={**fill(name), "line": {"width": 0.5 if is_few else 0, "color": LINE}},
        hovertemplate=f"step %{{x:.0f}}<br>{label}: %{{y:,.3~r}} ms<extra></extra>",
    )


def waits_over_time(summary: Summary) -> Picture:
    """Heat map of waiting by rank and step, with a mark on the rank that was waited for."""
    per_step, title = summary.per_step, "Waiting by rank and step"
    missing = ""
    if not per_step.steps or not per_step.wait_ms:
        missing = f"n/a: {why(summary.unavailable, 'exposed_wait', 'step_ms')}."
    elif len(per_step.wait_ms) == 1:
        missing = "There is one rank, and nobody it could wait for."
    elif not any(finite(value) for values in per_step.wait_ms.values() for value in values):
        missing = "No rank has waited for another."
    if missing:
        return Picture("waits", title, missing=missing)
    at = columns(per_step.steps)
    hosts = {each.rank: f" · {short(each.host)}" for each in summary.ranks}
    names = {rank: f"rank {rank}{hosts.get(rank, '')}" for rank in sorted(per_step.wait_ms)}
    waits = [[mean(per_step.wait_ms[rank][run]) for run in at.runs] for rank in names]
    is_few = len(at.runs) <= FEW_BARS
    traces = [
        go.Heatmap(
            x=at.middles,
            y=list(names.values()),
            z=waits,
            zmin=0,
            zmax=max(wait for row in waits for wait in row if wait is not None),
            colorscale=HEAT,
            colorbar={"title": {"text": "ms"}, **_COLORBAR},
            hoverongaps=False,
            xgap=int(is_few),
            ygap=1,
            hovertemplate="%{y}<br>step %{x:.0f}: wait %{z:,.3~r} ms<extra></extra>",
        )
    ]
    causes = [most_frequent(per_step.slowest[run]) for run in at.runs]
    marks = [(x, names[of]) for x, of in zip(at.middles, causes, strict=True) if of in names]
    if marks:
        marker = {"symbol": "circle-open", "size": 8 if is_few else 3, "color": INK}
        traces.append(
            go.Scatter(
                mode="markers",
                name="rank that most waiting was for",
                showlegend=True,
                x=[x for x, _ in marks],
                y=[name for _, name in marks],
                marker={**marker, "line": {"width": 1.5 if is_few else 1}},
                hoverinfo="skip",
            )
        )
    axes = {
        "xaxis": {"title": "step", "showgrid": False, "range": at.range},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    axes["yaxis"]["nticks"] = min(len(names), _MOST_NAMES)
    caption = (
        "How long each rank waited for others, hidden or exposed. A slow rank is a row without "
        f"waiting while others wait.{at.gaps}"
    )
    height = 120 + max(110, min(24 * len(names), 640))
    return Picture("waits", title, caption, {"": styled(go.Figure(traces), height, **axes)})


def links_between_hosts(summary: Summary) -> Picture:
    """Heat map of Gbit/s, from the row's host to the column's: all bits over all seconds."""
    title = "Bandwidth between hosts"
    hosts = {each.rank: each.host for each in summary.ranks}
    sent: dict[tuple[str, str], float] = defaultdict(float)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for link in summary.links:
        if link.get("peer") is not None:
            a, b = (
                hosts.get(rank, f"host of rank {rank}") for rank in (link["rank"], link["peer"])
            )
            pair = (a, b)
            sent[pair] += link["sent"]
            seconds[pair] += link["seconds"]
    rates = {pair: sent[pair] * 8e-9 / seconds[pair] for pair in sent if seconds[pair] > 0}
    if not rates:
        missing = f"n/a: {why(summary.unavailable, 'links')}."
        if summary.links:
            missing = "n/a between two hosts: only whole groups of ranks were."
        return Picture("links", title, missing=missing)
    names = sorted({name for pair in rates for name in pair})
    across = [rate for (row, column), rate in rates.items() if row != column]
    cells = [[(row, column, rates.get((row, column))) for column in names] for row in names]
    trace = go.Heatmap(
        z=[[None if rate is None else digits(rate) for _, _, rate in row] for row in cells],
        zmin=0,
        zmax=digits(max(across or rates.values())),
        text=[["" if rate is None else format_value(rate) for *_, rate in row] for row in cells],
        texttemplate="%{text}" if len(names) <= _MOST_RANKS else "",
        hovertext=[
            [f"{plain(a)} to {plain(b)}<br>{format_value(rate, 'Gbit/s')}" for a, b, rate in row]
            for row in cells
        ],
        hovertemplate=HOVER,
        hoverongaps=False,
        colorscale=HEAT,
        colorbar={"title": {"text": "Gbit/s"}, **_COLORBAR},
        xgap=2,
        ygap=2,
    )
    ticks = {"tickvals": list(range(len(names))), "ticktext": [short(name) for name in names]}
    drawn = styled(
        go.Figure(trace),
        150 + max(110, min(44 * len(names), 720)),
        xaxis={"title": "to", "side": "top", "showgrid": False, **ticks},
        yaxis={"title": "from", "autorange": "reversed", "showgrid": False, **ticks},
    )
    caption = (
        "Gbit/s from the host of the row to that of the column, on the idle link. The colours end "
        "at the fastest link between two hosts; an empty cell was not measured."
    )
    return Picture("links", title, caption, {"": drawn})


def errors_over_time(summary: Summary) -> Picture:
    """Compression error over steps: the median with the range as a band."""
    title = "Compression error"
    looks = {"relative_l2": "transfer", "cosine": "backward", "residual_ratio": "exposed_codec"}
    found: dict[str, dict[int, list[float]]] = {}
    for key in looks:
        for error in sorted(summary.errors, key=lambda error: int(error["step"])):
            if (value := finite(error.get(key))) is not None:
                found.setdefault(key, {}).setdefault(int(error["step"]), []).append(value)
    if not found:
        return Picture("errors", title, missing=f"n/a: {why(summary.unavailable, 'errors')}.")
    drawn = make_subplots(rows=len(found), cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for row, (key, by_step) in enumerate(found.items(), 1):
        for curve in _curves(METRICS[key].label, COLORS[looks[key]], by_step):
            drawn.add_trace(curve, row=row, col=1)
        drawn.update_yaxes(title_text=METRICS[key].label, row=row, col=1)
    drawn.update_xaxes(title_text="step", row=len(found), col=1)
    drawn = styled(drawn, 100 + 170 * len(found))
    caption = "Median over the sampled buckets and ranks; the band is the range."
    if "residual_ratio" not in found:
        caption += " There is no residual ratio: no residual was kept."
    return Picture("errors", title, caption, {"": drawn})


def _curves(name: str, color: str, by_step: Mapping[int, Sequence[float]]) -> list[go.Scatter]:
    steps = list(by_step)
    at = columns(steps)
    groups = {
        x: [value for step in steps[run] for value in by_step[step]]
        for x, run in zip(at.middles, at.runs, strict=True)
        if run.start < run.stop
    }
    x, few = list(groups), len(groups) <= FEW_BARS
    low, middle, high = (
        [digits(of(group), count=8) for group in groups.values()] for of in (min, median, max)
    )
    edge = {"x": x, "mode": "lines", "line": {"width": 0}, "showlegend": False}
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    band = f"rgba({red}, {green}, {blue}, 0.25)"
    return [
        go.Scatter(y=low, hoverinfo="skip", **edge),
        go.Scatter(y=high, hoverinfo="skip", fill="tonexty", fillcolor=band, **edge),
        go.Scatter(
            x=x,
            y=middle,
            name=name,
            mode="lines+markers" if few else "lines",
            line={"width": 2, "color": color},
            customdata=list(zip(low, high, strict=True)),
            hovertemplate=f"step %{{x:.0f}}<br>{name}: %{{y:.6~g}} "
            "(%{customdata[0]:.6~g} to %{customdata[1]:.6~g})<extra></extra>",
        ),
    ]


def predicted_steps(summary: Summary) -> Picture | None:
    """Bars of predicted steps; None where the simulation has no error to be judged by."""
    found = summary.predictions
    told = [] if found is None else [each for each in found.scenarios if each.step_ms is not None]
    if found is None or found.tolerance is None or not told:
        return None
    own = f"{plain(name_of(found.baseline, found.baseline))} (this run)"
    names = [own, *(plain(name_of(each, found.baseline)) for each in told)]
    steps = [each.step_ms or 0.0 for each in (found.baseline, *told)]
    exposed = [each.exposed_ms or 0.0 for each in (found.baseline, *told)]
    rest = [step - of_it for step, of_it in zip(steps, exposed, strict=True)]
    error = {"type": "data", "array": [found.tolerance * step for step in steps], "color": INK}
    stacks = (("not exposed", rest, "backward", None), ("exposed", exposed, "transfer", error))
    traces = [
        go.Bar(
            orientation="h",
            name=name,
            x=values,
            y=names,
            marker=fill(color),
            error_x=errors,
            hovertemplate=f"%{{y}}<br>{name}: %{{x:,.3~r}} ms<extra></extra>",
        )
        for name, values, color, errors in stacks
    ]
    traces.append(
        go.Scatter(
            mode="markers",
            name="measured",
            x=[found.measured_ms],
            y=[own],
            marker={"symbol": "diamond", "size": 11, "color": INK},
            hovertemplate="%{y}<br>measured: %{x:,.3~r} ms<extra></extra>",
        )
    )
    # plotly leaves out every other name
    ticks = {"type": "category", "tickmode": "array", "tickvals": names}
    drawn = styled(
        go.Figure(traces),
        110 + 26 * len(names),
        barmode="stack",
        xaxis={"title": "ms per step", "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "showgrid": False, **ticks},
    )
    caption = (
        "All bars are simulated, also that of the run itself, beside which is the measured step. "
        f"Differences below {format_value(found.tolerance, '%')} are within the error."
    )
    return Picture("whatif-steps", f"{PREDICTED}, by setting", caption, {"": drawn})


def fill(name: str) -> dict[str, Any]:
    """Colour of a bar, with the pattern that goes with it."""
    color = COLORS.get(name, COLORS["other"])
    if name not in _PATTERNS:
        return {"color": color}
    look = {"fgcolor": "#14171c", "fgopacity": 0.75, "size": 6, "solidity": 0.25}
    return {"color": color, "pattern": {"shape": _PATTERNS[name], "fillmode": "overlay", **look}}


def styled(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    """``figure`` in the style of the page. Its tools stand in the right margin, over nothing."""
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
    return plain(text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 1]}…")
