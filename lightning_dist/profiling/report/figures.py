"""Figures of the page. Imports plotly, so only the page imports this.

Colours are those of the light scheme; the page replaces them by :data:`DARK` in the dark one.
"""

from __future__ import annotations

import html
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import plotly.graph_objects as go
from plotly.colors import hex_to_rgb
from plotly.subplots import make_subplots

from lightning_dist.profiling.analysis.metrics import METRICS, finite, format_value
from lightning_dist.profiling.analysis.parts import PARTS, Summary
from lightning_dist.profiling.report.tables import View, missing
from lightning_dist.profiling.whatif.predictions import LABEL, name_of

INK, LINE, GRID, RAISED = "#1b1f24", "#c9ced6", "#e6e8ec", "#f5f6f8"
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

_HEAT = [[0, "#e3eaf2"], [0.25, "#9ecbea"], [0.6, "#2b7bba"], [1, "#08306b"]]
DARK = {
    **{INK: "#e8eaed", LINE: "#434b57", GRID: "#2a3038", RAISED: "#1e232a"},
    **{"#0072b2": "#2a86c4", "#8c8c8c": "#a6a6a6", "#c4c8ce": "#5c6572"},
    **{"#e3eaf2": "#27303b", "#9ecbea": "#1f4f7d", "#2b7bba": "#4a9bd4", "#08306b": "#d6ecfb"},
}
"""Colour of the dark scheme by that of the light one; others are in both."""

_AXIS = {
    **{"automargin": True, "linecolor": LINE, "zeroline": False, "gridcolor": GRID},
    "title": {"standoff": 10},
}
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
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    }
}
HOVER = "%{hovertext}<extra></extra>"
_MOST_BARS = 250
"""Half of the steps that a summary is of: where those are spread evenly, no bin is empty."""
_FEW_BARS = 80
"""Up to so many there is room for gaps, outlines and marks."""
_MOST_RATES = 16
"""Hosts up to which the cells of the heat map have room for text."""
_MOST_NAMES = 40
_LONGEST_NAME = 24


@dataclass(frozen=True)
class Bins:
    """Equal parts of an axis of steps.

    Args:
        width: of every bin, in steps.
        middles: where the bins are on the axis.
        runs: slices of the steps, one for each bin; empty where no step was recorded.
    """

    width: int
    middles: Sequence[float]
    runs: Sequence[slice]

    @property
    def are_few(self) -> bool:
        """True if there is room for details of each."""
        return len(self.runs) <= _FEW_BARS

    @property
    def axis(self) -> dict[str, Any]:
        """A horizontal axis with room for exactly these bins."""
        ends = self.middles[0] - self.width / 2, self.middles[-1] + self.width / 2
        return {"title": "step", "showgrid": False, "range": ends}

    @property
    def blank(self) -> str:
        """Sentence of a caption that says why some bins are empty, if there are such."""
        is_any = any(run.start == run.stop for run in self.runs)
        return " Steps that were not looked at in detail are blank." if is_any else ""

    def groups(self, values: Sequence[float | None]) -> dict[float, list[float]]:
        """The numbers in each bin, by its middle, of one value for each step; no empty ones."""
        found = ([finite(value) for value in values[run]] for run in self.runs)
        known = ([value for value in group if value is not None] for group in found)
        return {x: group for x, group in zip(self.middles, known, strict=True) if group}


def bins_of(steps: Sequence[int], *, most: int = _MOST_BARS) -> Bins:
    """At most ``most`` bins from the first of these sorted steps to the last."""
    if not steps:
        return Bins(1, (), ())
    width = math.ceil((steps[-1] - steps[0] + 1) / most)
    begins = range(steps[0], steps[-1] + 1, width)
    cuts = [*(bisect_left(steps, begin) for begin in begins), len(steps)]
    runs = [slice(a, b) for a, b in pairwise(cuts)]
    return Bins(width, [begin + (width - 1) / 2 for begin in begins], runs)


def steps_over_time(summary: Summary) -> View:
    """Stacked bars of the parts, one per step or per run of steps."""
    at, parts, bars = bins_of(summary.per_step.steps), summary.per_step.breakdown_ms, []
    for name in (name for name in PARTS if name in parts):
        means = {x: fmean(group) for x, group in at.groups(parts[name]).items()}
        if any(means.values()):  # else it is a name in the legend and nothing to see
            label = METRICS[name].label
            bar = go.Bar(
                name=label,
                x=list(means),
                y=list(means.values()),
                width=at.width * (0.85 if at.are_few else 1),
                marker={**fill(name), "line": {"width": 0.5 if at.are_few else 0, "color": LINE}},
                hovertemplate=f"step %{{x:.0f}}<br>{label}: %{{y:,.3~r}} ms<extra></extra>",
            )
            bars.append(bar)
    title = "Steps over time"
    if not bars:
        return View("steps", title, missing=missing(summary, "breakdown_ms", "step_ms"))
    caption = "Mean over ranks. The four exposed parts are the cost of communication."
    if at.width > 1:
        caption += f" Each bar is the mean of up to {at.width} consecutive steps."
    y_axis = {"title": "ms per step", "rangemode": "tozero"}
    drawn = styled(bars, 440, barmode="stack", xaxis=at.axis, yaxis=y_axis)
    return View("steps", title, caption + at.blank, figures={"": drawn})


def waits_over_time(summary: Summary) -> View:
    """Heat map of waiting by rank and step, with a mark on the rank that was waited for."""
    per_step, title = summary.per_step, "Waiting by rank and step"
    at = bins_of(per_step.steps)
    waits = {
        rank: {x: fmean(group) for x, group in at.groups(values).items()}
        for rank, values in sorted(per_step.wait_ms.items())
    }
    longest = max((wait for means in waits.values() for wait in means.values()), default=0)
    if not per_step.steps or not waits:
        return View("waits", title, missing=missing(summary, "exposed_wait", "step_ms"))
    if len(waits) == 1:
        return View("waits", title, missing="There is one rank, and nobody it could wait for.")
    if not longest:
        return View("waits", title, missing="No rank has waited for another.")
    hosts = {each.rank: f" · {short(each.host)}" for each in summary.ranks}
    names = {rank: f"rank {rank}{hosts.get(rank, '')}" for rank in waits}
    hover = "%{y}<br>step %{x:.0f}: wait %{z:,.3~r} ms<extra></extra>"
    z = [[means.get(x) for x in at.middles] for means in waits.values()]
    cells = {"x": at.middles, "y": list(names.values()), "xgap": int(at.are_few), "ygap": 1}
    traces = [_heat_map("ms", longest, z=z, hovertemplate=hover, **cells)]
    slowest = zip(per_step.steps, per_step.slowest, strict=True)
    if marks := [(step, names[rank]) for step, rank in slowest if rank in names]:
        look = {"symbol": "circle-open", "color": INK, "size": 8 if at.are_few else 3}
        scatter = go.Scatter(
            mode="markers",
            name="rank that most waiting was for",
            showlegend=True,
            x=[step for step, _ in marks],
            y=[name for _, name in marks],
            marker={**look, "line": {"width": 1.5 if at.are_few else 1}},
            hoverinfo="skip",
        )
        traces.append(scatter)
    ticks = {"type": "category", "nticks": min(len(names), _MOST_NAMES)}
    y_axis = {"autorange": "reversed", "showgrid": False, **ticks}
    caption = (
        "How long each rank waited for others, hidden or exposed. A slow rank is a row without "
        f"waiting while others wait.{at.blank}"
    )
    height = 120 + max(110, min(24 * len(names), 640))
    drawn = styled(traces, height, xaxis=at.axis, yaxis=y_axis)
    return View("waits", title, caption, figures={"": drawn})


def links_between_hosts(summary: Summary) -> View:
    """Heat map of Gbit/s, from the row's host to the column's: all bits over all seconds."""
    title, hosts = "Bandwidth between hosts", {each.rank: each.host for each in summary.ranks}
    sent: Counter[tuple[str, ...]] = Counter()
    seconds: Counter[tuple[str, ...]] = Counter()
    for link in (each for each in summary.links if each.get("peer") is not None):
        ends = (link["rank"], link["peer"])
        pair = tuple(hosts.get(rank, f"host of rank {rank}") for rank in ends)
        sent[pair] += link["sent"]
        seconds[pair] += link["seconds"]
    rates = {pair: sent[pair] * 8e-9 / of for pair, of in seconds.items() if of > 0}
    if not rates:
        only_groups = "n/a between two hosts: only groups of ranks were measured."
        sentence = only_groups if summary.links else missing(summary, "links")
        return View("links", title, missing=sentence)
    names = sorted({name for pair in rates for name in pair})
    labels = [plain(name) for name in names]
    heat = _heat_map(
        "Gbit/s",
        max([rate for (row, column), rate in rates.items() if row != column] or rates.values()),
        x=labels,
        y=labels,
        z=[[rates.get((row, column)) for column in names] for row in names],
        texttemplate="%{z:.3r}" if len(names) <= _MOST_RATES else "",
        hovertemplate="%{y} to %{x}<br>%{z:.3r} Gbit/s<extra></extra>",
        xgap=2,
        ygap=2,
    )
    ticks = {"tickvals": labels, "ticktext": [short(name) for name in names]}
    axis = {"type": "category", "showgrid": False, **ticks}
    caption = (
        "Gbit/s from the host of the row to that of the column, on the idle link. The colours end "
        "at the fastest link between two hosts; an empty cell was not measured."
    )
    drawn = styled(
        [heat],
        150 + max(110, min(44 * len(names), 720)),
        xaxis={"title": "to", "side": "top", **axis},
        yaxis={"title": "from", "autorange": "reversed", **axis},
    )
    return View("links", title, caption, figures={"": drawn})


def errors_over_time(summary: Summary) -> View:
    """Compression error over steps: the median with the range as a band."""
    looks = {"relative_l2": "transfer", "cosine": "backward", "residual_ratio": "exposed_codec"}
    found = {}
    for key in looks:
        values = ((int(each["step"]), finite(each.get(key))) for each in summary.errors)
        if points := sorted((step, value) for step, value in values if value is not None):
            found[key] = points
    if not found:
        return View("errors", "Compression error", missing=missing(summary, "errors"))
    drawn = make_subplots(rows=len(found), cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for row, (key, points) in enumerate(found.items(), 1):
        for curve in _band(METRICS[key].label, _LOOKS[looks[key]][0], points):
            drawn.add_trace(curve, row=row, col=1)
        drawn.update_yaxes(title_text=METRICS[key].label, row=row, col=1)
    drawn.update_xaxes(title_text="step", row=len(found), col=1)
    caption = "Median over the sampled buckets and ranks; the band is the range."
    if "residual_ratio" not in found:
        caption += " There is no residual ratio: no residual was kept."
    drawn = styled(drawn, 100 + 170 * len(found))
    return View("errors", "Compression error", caption, figures={"": drawn})


def _band(name: str, color: str, points: Sequence[tuple[int, float]]) -> list[go.Scatter]:
    """The median of points ``(step, value)`` as a line, and their range as a band behind it."""
    groups = bins_of([step for step, _ in points]).groups([value for _, value in points])
    x = list(groups)
    low, middle, high = ([of(group) for group in groups.values()] for of in (min, median, max))
    edge = {"x": x, "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    line = go.Scatter(
        x=x,
        y=middle,
        name=name,
        mode="lines+markers" if len(x) <= _FEW_BARS else "lines",
        line={"width": 2, "color": color},
        customdata=list(zip(low, high, strict=True)),
        hovertemplate=f"step %{{x:.0f}}<br>{name}: %{{y:.6~g}} "
        "(%{customdata[0]:.6~g} to %{customdata[1]:.6~g})<extra></extra>",
    )
    inside = {"fill": "tonexty", "fillcolor": f"rgba{(*hex_to_rgb(color), 0.25)}"}
    return [go.Scatter(y=low, **edge), go.Scatter(y=high, **inside, **edge), line]


def predicted_steps(summary: Summary) -> View | None:
    """Bars of predicted steps; None where the simulation has no error to be judged by."""
    found = summary.predictions
    if found is None or found.tolerance is None:
        return None
    others = [each for each in found.scenarios if each.step_ms is not None]
    if not others:
        return None
    own = f"{plain(name_of(found.baseline, found.baseline))} (this run)"
    names = [own, *(plain(name_of(each, found.baseline)) for each in others)]
    steps = [each.step_ms or 0.0 for each in (found.baseline, *others)]
    exposed = [each.exposed_ms or 0.0 for each in (found.baseline, *others)]
    rest = [step - of_it for step, of_it in zip(steps, exposed, strict=True)]
    error = {"type": "data", "array": [found.tolerance * step for step in steps], "color": INK}
    stacks = (("not exposed", rest, "backward", None), ("exposed", exposed, "transfer", error))
    traces = [
        go.Bar(
            orientation="h",
            name=name,
            x=values,
            y=names,
            marker=fill(look),
            error_x=errors,
            hovertemplate=f"%{{y}}<br>{name}: %{{x:,.3~r}} ms<extra></extra>",
        )
        for name, values, look, errors in stacks
    ]
    measured = go.Scatter(
        mode="markers",
        name="measured",
        x=[found.measured_ms],
        y=[own],
        marker={"symbol": "diamond", "size": 11, "color": INK},
        hovertemplate="%{y}<br>measured: %{x:,.3~r} ms<extra></extra>",
    )
    # plotly leaves out every other name
    ticks = {"type": "category", "tickmode": "array", "tickvals": names}
    drawn = styled(
        [*traces, measured],
        110 + 26 * len(names),
        barmode="stack",
        xaxis={"title": "ms per step", "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "showgrid": False, **ticks},
    )
    caption = (
        "All bars are simulated, also that of the run itself, beside which is the measured step. "
        f"Differences below {format_value(found.tolerance, '%')} are within the error."
    )
    return View("whatif-steps", f"{LABEL}, by setting", caption, figures={"": drawn})


def fill(name: str) -> dict[str, Any]:
    """Colour of a bar, with the pattern that goes with it."""
    color, shape = _LOOKS.get(name, _LOOKS["other"])
    look = {"fgcolor": "#14171c", "fgopacity": 0.75, "size": 6, "solidity": 0.25}
    pattern = {"shape": shape, "fillmode": "overlay", **look}
    return {"color": color, "pattern": pattern} if shape else {"color": color}


def _heat_map(unit: str, highest: float, **cells: Any) -> go.Heatmap:
    bar = {"title": {"text": unit}, "thickness": 12, "outlinewidth": 0, "nticks": 5}
    look = {"colorscale": _HEAT, "colorbar": bar, "hoverongaps": False}
    return go.Heatmap(zmin=0, zmax=highest, **look, **cells)


def styled(drawn: go.Figure | Sequence[Any], height: int, **layout: Any) -> go.Figure:
    """A figure in the style of the page. Its tools stand in the right margin, over nothing."""
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
