"""Time line of a step: what every rank did, on one clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from lightning_dist.profiling.analysis.intervals import lanes
from lightning_dist.profiling.analysis.metrics import METRICS, format_value, why
from lightning_dist.profiling.analysis.parts import Summary, Timeline, TimelineSpan
from lightning_dist.profiling.capture.events import PHASES
from lightning_dist.profiling.report.figures import HOVER, fill, plain, short, styled
from lightning_dist.profiling.report.tables import View, missing

_MOST_RANKS = 16
_WORK = {
    "encode": "encode",
    "decode": "decode",
    "wait": "wait for the last rank",
    "transfer": "transfer",
    "exchange": "collective, launches not known",
}
_BACKGROUND, _PHASE, _SPAN = range(3)
_LOOKS: tuple[dict[str, Any], ...] = ({"opacity": 0.16, "showlegend": False}, {"opacity": 0.9}, {})
"""Of the background of a phase, of its strip, and of work."""


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
    if not any(of for each in steps for of in (*each.phases.values(), *each.spans.values())):
        reason = why(summary.unavailable, "buckets")
        return View("timeline", title, missing=f"Nothing was recorded inside this step: {reason}.")
    everyone = sorted({rank for each in steps for rank in (*each.phases, *each.spans)})
    ranks = most_telling(summary, everyone)
    caption = (
        "Below the phases of each rank: codec work, then collectives from their launch on this "
        "rank to their end, with the number of their bucket. What lies behind a rank's last "
        "triangle is exposed. Times count from the begin of the step on the first rank."
    )
    if not any(of for each in steps for of in each.spans.values()):
        caption = "Only phases: buckets and collectives of this step were not recorded."
    if len(ranks) < len(everyone):
        caption += f" Shown are {len(ranks)} of {len(everyone)} ranks: those that waited most, or"
        caption += " that others waited for."
    drawn = {f"{each.label} ({each.step})": _figure(summary, each, ranks) for each in steps}
    return View("timeline", title, caption, figures=drawn)


def most_telling(summary: Summary, ranks: Sequence[int]) -> list[int]:
    """All ranks; of too many those with the most waiting, that of others for them included."""
    waits = {each.rank: (each.waited_for_ms or 0) + (each.wait_ms or 0) for each in summary.ranks}
    return sorted(sorted(ranks, key=lambda rank: -waits.get(rank, 0))[:_MOST_RANKS])


def _figure(summary: Summary, step: Timeline, ranks: Sequence[int]) -> go.Figure:
    bars: dict[tuple[int, str], list[_Bar]] = defaultdict(list)
    ready: list[tuple[float, float, str]] = []
    hosts = {each.rank: f"<br>{short(each.host)}" for each in summary.ranks}
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
        names[middle] = f"rank {rank}{hosts.get(rank, '')}"
        top = bottom + 0.6
    order = [*PHASES, *_WORK]
    keys = sorted(bars, key=lambda key: (key[0], order.index(key[1]) if key[1] in order else 99))
    traces = [_trace(layer, name, bars[layer, name]) for layer, name in keys]
    if ready:
        x, heights, hovers = (list(of) for of in zip(*ready, strict=True))
        marks = go.Scatter(
            mode="markers",
            name="gradients of a bucket ready",
            x=x,
            y=heights,
            marker={"symbol": "triangle-down", "size": 9},
            hovertext=hovers,
            hovertemplate=HOVER,
        )
        traces.append(marks)
    last = max(bar.base + bar.x for of in bars.values() for bar in of)
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
    hover, lasted = f"rank {rank}, bucket {span.bucket}<br>", _ms(span.end - span.begin)
    if span.phase != "exchange":
        parts = [("encode" if span.phase == "encode" else "decode", span.begin, span.end)]
        hover += f"{plain(span.phase)}: {lasted}"
    else:
        hover += f"{plain(span.op)} in {plain(span.group)}, {format_value(span.sent, 'B')} sent<br>"
        moves = span.moves_from
        if span.arrival is None:
            parts = [("exchange", span.begin, span.end)]
            hover += f"{lasted}, wait not told apart"
        else:
            parts = [("wait", span.begin, moves), ("transfer", moves, span.end)]
            hover += f"wait {_ms(moves - span.begin)}, transfer {_ms(span.end - moves)}"
    longest = max(parts, key=lambda part: part[2] - part[1])
    for name, begin, end in parts:
        if begin < end or len(parts) == 1:
            text = str(span.bucket) if name == longest[0] else ""
            yield name, _Bar(begin / 1e6, (end - begin) / 1e6, y, 0.86, text, hover)


def _trace(layer: int, name: str, bars: Sequence[_Bar]) -> go.Bar:
    outline = {"width": 0.5 if layer == _SPAN else 0}
    return go.Bar(
        orientation="h",
        name=_WORK[name] if layer == _SPAN else _label(name),
        **dict(zip(_Bar._fields, map(list, zip(*bars, strict=True)), strict=True)),
        hovertemplate=HOVER,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        marker={**fill("exposed_other" if name == "exchange" else name), "line": outline},
        **_LOOKS[layer],
    )


def _label(phase: str) -> str:
    return METRICS[phase].label if phase in METRICS else plain(phase)


def _ms(nanoseconds: int) -> str:
    return format_value(nanoseconds / 1e6, "ms")
