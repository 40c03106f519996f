"""Figures of a run, and the page of all of them. Imports plotly, so only the page imports this."""

from __future__ import annotations

import html
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from lightning_dist.base.shared_folder import replace_file
from lightning_dist.profiling.analysis.metrics import METRICS, finite, format_value, why
from lightning_dist.profiling.analysis.parts import PARTS, Summary, Timeline, TimelineSpan, lanes
from lightning_dist.profiling.capture.events import OF_NO_BUCKET, PHASES
from lightning_dist.profiling.report import tables
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
_ON_PATTERN = {"color": "#ffffff", "shadow": "0 0 3px #000, 0 0 3px #000, 0 0 4px #000"}
"""Text that the lines and dots of a pattern leave readable."""
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

_HOVER = "%{hovertext}<extra></extra>"
_MOST_NAMES = 40
_LONGEST_NAME = 24

_MOST_RANKS = 16
_WORK = {
    "encode": "encode",
    "decode": "decode",
    "wait": "wait for the last rank",
    "transfer": "transfer",
    "exchange": "collective, launches not known",
}
_BACKGROUND, _PHASE, _SPAN = range(3)
_LAYERS: tuple[dict[str, Any], ...] = ({"opacity": 0.16, "showlegend": False}, {"opacity": 0.9}, {})
"""Looks of the background of a phase, of its strip, and of work."""


def steps_over_time(summary: Summary) -> View:
    """Stacked bars of the parts, one for each detailed step."""
    parts, bars = summary.per_step.breakdown_ms, []
    for name in (name for name in PARTS if any(map(finite, parts.get(name, ())))):
        label = METRICS[name].label
        bar = go.Bar(
            name=label,
            x=list(summary.per_step.steps),
            y=list(parts[name]),
            marker=_fill(name),
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
    for mark in summary.generations:  # at the begin of the first step of it that is shown
        at = bisect_left(summary.per_step.steps, mark["step"]) - 0.5
        label = f"generation {mark['number']}"
        drawn.add_vline(x=at, line_dash="dot", opacity=0.6, annotation_text=label)
    return View("steps", title, caption, figures={"": drawn})


def waits_over_time(summary: Summary) -> View:
    """Heat map of waiting by rank and step."""
    per_step, title = summary.per_step, "Waiting by rank and step"
    waits = dict(sorted(per_step.wait_ms.items()))
    longest = max((finite(wait) or 0 for of_rank in waits.values() for wait in of_rank), default=0)
    if not per_step.steps or not waits:
        return View("waits", title, missing=missing(summary, "exposed_wait", "step_ms"))
    if len(waits) == 1:
        return View("waits", title, missing="One rank: nothing to wait for.")
    if not longest:
        return View("waits", title, missing="No rank waited for another.")
    nodes = {rank.rank: f" · {_short(rank.node)}" for rank in summary.ranks}
    names = {rank: f"rank {rank}{nodes.get(rank, '')}" for rank in waits}
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
    ticks = {"type": "category", "nticks": min(len(names), _MOST_NAMES)}
    y_axis = {"autorange": "reversed", "showgrid": False, **ticks}
    caption = (
        "Time each rank waited for others, hidden or exposed. A slow rank is a row without waiting "
        "while others wait."
    )
    height = 120 + max(110, min(24 * len(names), 640))
    drawn = styled([heat], height, xaxis=_steps_axis(summary), yaxis=y_axis)
    return View("waits", title, caption, figures={"": drawn})


def _steps_axis(summary: Summary) -> dict[str, Any]:
    """The numbers of the detailed steps, one beside the other."""
    ends = [-0.5, len(summary.per_step.steps) - 0.5]
    return {"title": "step", "type": "category", "range": ends, "showgrid": False, "nticks": 20}


class _Bar(NamedTuple):
    """A horizontal bar: begin and duration in milliseconds, middle and height in lanes."""

    base: float
    x: float
    y: float
    width: float
    text: str
    hovertext: str


def timeline(summary: Summary, steps: Sequence[Timeline]) -> View:
    """One step on all ranks, of several to choose from."""
    title = "Time line of a step"
    if not steps:
        return View("timeline", title, missing=missing(summary, "step_ms"))
    if not any(any((*step.phases.values(), *step.spans.values())) for step in steps):
        reason = why(summary.unavailable, "buckets")
        return View("timeline", title, missing=f"Nothing was recorded inside this step: {reason}.")
    everyone = sorted({rank for step in steps for rank in (*step.phases, *step.spans)})
    ranks = most_telling(summary, everyone)
    caption = (
        "Below the phases of each rank: codec work, then collectives from their launch on this "
        "rank to their end, with the number of their bucket. What lies behind a rank's last "
        "triangle is exposed. Times are from the start of the step on the first rank."
    )
    if not any(any(step.spans.values()) for step in steps):
        caption = "Only phases: buckets and collectives of this step were not recorded."
    if len(ranks) < len(everyone):
        caption += f" Shown are {len(ranks)} of {len(everyone)} ranks: those that waited most, or"
        caption += " that others waited for."
    drawn = {f"{step.label} ({step.step})": _figure(summary, step, ranks) for step in steps}
    return View("timeline", title, caption, figures=drawn)


def most_telling(summary: Summary, ranks: Sequence[int]) -> list[int]:
    """All ranks; of too many those with the most waiting, that of others for them included."""
    waits = {rank.rank: (rank.waited_for_ms or 0) + (rank.wait_ms or 0) for rank in summary.ranks}
    return sorted(sorted(ranks, key=lambda rank: -waits.get(rank, 0))[:_MOST_RANKS])


def _figure(summary: Summary, step: Timeline, ranks: Sequence[int]) -> go.Figure:
    bars: dict[tuple[int, str], list[_Bar]] = defaultdict(list)
    ready: list[tuple[float, float, str]] = []
    nodes = {rank.rank: f"<br>{_short(rank.node)}" for rank in summary.ranks}
    top, names = 0.0, {}
    for rank in ranks:
        bottom, spans = top + 1, step.spans.get(rank, ())
        for is_exchange in (False, True):
            work = [span for span in spans if (span.phase == "exchange") is is_exchange]
            chosen = lanes([(span.begin, span.end) for span in work])
            for span, lane in zip(work, chosen, strict=True):
                for name, bar in _bars(span, rank, bottom + 0.5 + lane):
                    bars[_SPAN, name].append(bar)
            bottom += len({*chosen})
        middle = (top + bottom) / 2
        for phase, begin, end in step.phases.get(rank, ()):
            label, times = _label(phase), (begin / 1e6, (end - begin) / 1e6)
            hover = f"rank {rank}: {label}, {_ms(end - begin)}"
            bars[_BACKGROUND, phase].append(_Bar(*times, middle, bottom - top, "", hover))
            bars[_PHASE, phase].append(_Bar(*times, top + 0.5, 0.86, label, hover))
        for index, time, done in step.buckets.get(rank, ()):
            hover = f"rank {rank}, bucket {index}<br>gradients ready at {_ms(time)}, "
            ready.append((time / 1e6, top + 1, f"{hover}averaged at {_ms(done)}"))
        names[middle] = f"rank {rank}{nodes.get(rank, '')}"
        top = bottom + 0.6
    order = [*PHASES, *_WORK]
    keys = sorted(bars, key=lambda key: (key[0], order.index(key[1]) if key[1] in order else 99))
    traces = [_trace(layer, name, bars[layer, name]) for layer, name in keys]
    if ready:
        x, heights, hovers = (list(column) for column in zip(*ready, strict=True))
        marks = go.Scatter(
            mode="markers",
            name="gradients of a bucket ready",
            x=x,
            y=heights,
            marker={"symbol": "triangle-down", "size": 9},
            hovertext=hovers,
            hovertemplate=_HOVER,
        )
        traces.append(marks)
    last = max(bar.base + bar.x for of_layer in bars.values() for bar in of_layer)
    return styled(
        traces,
        round(165 + max(60, top * max(5.0, min(22.0, 1500 / top)))),
        barmode="overlay",
        xaxis={"title": "time in the step, ms", "range": [0, last]},
        yaxis={"range": [top - 0.3, -0.3], "showgrid": False},
        yaxis_tickvals=list(names),
        yaxis_ticktext=list(names.values()),
        uniformtext={"minsize": 8, "mode": "hide"},
    )


def _bars(span: TimelineSpan, rank: int, y: float) -> Iterator[tuple[str, _Bar]]:
    """A bar with its name; of a collective two where it is known when the last rank launched it."""
    bucket = "FSDP" if span.bucket == OF_NO_BUCKET else f"bucket {span.bucket}"
    hover, lasted = f"rank {rank}, {bucket}<br>", _ms(span.end - span.begin)
    if span.phase != "exchange":
        parts = [("encode" if span.phase == "encode" else "decode", span.begin, span.end)]
        hover += f"{_plain(span.phase)}: {lasted}"
    else:
        hover += (
            f"{_plain(span.op)} in {_plain(span.group)}, {format_value(span.sent, 'B')} sent<br>"
        )
        moves = span.transfer[0]
        if span.arrival is None:
            parts = [("exchange", span.begin, span.end)]
            hover += f"{lasted}, waiting not separated"
        else:
            parts = [("wait", span.begin, moves), ("transfer", moves, span.end)]
            hover += f"wait {_ms(moves - span.begin)}, transfer {_ms(span.end - moves)}"
    longest = max(parts, key=lambda part: part[2] - part[1])
    for name, begin, end in parts:
        if begin < end or len(parts) == 1:
            text = bucket.removeprefix("bucket ") if name == longest[0] else ""
            yield name, _Bar(begin / 1e6, (end - begin) / 1e6, y, 0.86, text, hover)


def _trace(layer: int, name: str, bars: Sequence[_Bar]) -> go.Bar:
    outline = {"width": 0.5 if layer == _SPAN else 0}
    return go.Bar(
        orientation="h",
        name=_WORK[name] if layer == _SPAN else _label(name),
        **dict(zip(_Bar._fields, map(list, zip(*bars, strict=True)), strict=True)),
        hovertemplate=_HOVER,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont=_ON_PATTERN if _LOOKS.get(name, _LOOKS["other"])[1] else None,
        marker={**_fill("exposed_other" if name == "exchange" else name), "line": outline},
        **_LAYERS[layer],
    )


def _label(phase: str) -> str:
    return METRICS[phase].label if phase in METRICS else _plain(phase)


def _ms(nanoseconds: int) -> str:
    return format_value(nanoseconds / 1e6, "ms")


def _fill(name: str) -> dict[str, Any]:
    """Colour of a bar, with the pattern that goes with it."""
    color, shape = _LOOKS.get(name, _LOOKS["other"])
    return {"color": color, "pattern": {"shape": shape}}


def styled(traces: Sequence[Any], height: int, **layout: Any) -> go.Figure:
    """A figure of the page. Its tools stand in the right margin, over nothing."""
    has_scale = any(isinstance(trace, go.Heatmap) for trace in traces)
    of_page = {
        "template": _template(),
        "height": height,
        "margin": {"l": 60, "r": 16 if has_scale else 44, "t": 16, "b": 48},
        "modebar": {"orientation": "h" if has_scale else "v", "bgcolor": "rgba(0,0,0,0)"},
        "uirevision": "keep",
    }
    return go.Figure(traces, layout={**of_page, **layout})


@cache
def _template() -> go.layout.Template:
    # plotly checks every entry, which takes longer than all else of a figure.
    return go.Figure().update_layout(template=_TEMPLATE).layout.template


def _plain(text: Any) -> str:
    """Text of the run without tags, which plotly would read."""
    return html.escape(str(text), quote=False)


def _short(text: str) -> str:
    """Text of the run with a limited length, without tags."""
    return _plain(text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…")


def write_report(path: str | Path, summary: Summary, timelines: Sequence[Timeline]) -> None:
    """Write the page; equal arguments give equal bytes. ``timelines``: the steps to choose from."""
    replace_file(path, page(summary, timelines).encode())


def page(summary: Summary, timelines: Sequence[Timeline]) -> str:
    """The text of the page."""
    environment = Environment(
        loader=PackageLoader("lightning_dist.profiling", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    views = (
        steps_over_time(summary),
        tables.parts_table(summary),
        timeline(summary, timelines),
        tables.ranks_table(summary),
        waits_over_time(summary),
        tables.whatif_table(summary),
        tables.links_table(summary),
        tables.buckets_table(summary),
        tables.run_table(summary),
    )
    drawn = {view.id: list(view.figures.values()) for view in views if view.figures}
    script = Path(str(summary.run.get("script") or "")).name
    started = str(summary.run.get("started") or "").replace("T", " ").replace("+00:00", " UTC")
    return environment.get_template("page.html").render(
        summary=summary,
        origin=", ".join(filter(None, (script, started and f"started {started}"))),
        facts=tables.facts(summary),
        views=views,
        unavailable=[
            (METRICS[key].label if key in METRICS else key, reason)
            for key, reason in sorted(summary.unavailable.items())
        ],
        metrics=[
            metric for metric in METRICS.values() if metric.meaning and metric.key not in PARTS
        ],
        figures=to_json_plotly(drawn),  # in which nothing can end the script
        plotly=get_plotlyjs() if drawn else "",
    )


def _code(text: str) -> Markup:
    """Text with what is between backticks as code; all else of it is only text."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
