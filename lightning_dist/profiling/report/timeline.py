"""Time line of a step: what every rank did, on one clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from lightning_dist.profiling.analysis.intervals import lanes
from lightning_dist.profiling.analysis.metrics import format_value, why
from lightning_dist.profiling.analysis.parts import Summary, Timeline, TimelineSpan
from lightning_dist.profiling.capture.events import PHASES
from lightning_dist.profiling.report import figures
from lightning_dist.profiling.report.figures import HOVER, INK, LINE, Picture, plain

_MOST_RANKS = 16
_WORK = {
    "encode": "encode",
    "decode": "decode",
    "wait": "wait for the last rank",
    "transfer": "transfer",
    "exchange": "collective, launches not known",
}
_BEHIND, _PHASE, _SPAN = range(3)
_LOOKS: tuple[dict[str, Any], ...] = ({"opacity": 0.16, "showlegend": False}, {"opacity": 0.9}, {})
"""Of the background of a phase, of its strip, and of work."""

_Bar = tuple[int, int, float, float, str, str]
"""Begin and end in nanoseconds, middle and height in lanes, text, hover text."""


def timeline(summary: Summary, steps: Sequence[Timeline]) -> Picture:
    """One step on all ranks, of several to choose from."""
    title = "Time line of a step"
    if not steps:
        missing = f"n/a: {why(summary.unavailable, 'step_ms')}."
        return Picture("timeline", title, missing=missing)
    if not any(of for each in steps for of in (*each.phases.values(), *each.spans.values())):
        missing = f"Nothing was recorded inside this step: {why(summary.unavailable, 'buckets')}."
        return Picture("timeline", title, missing=missing)
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
        caption += f" Shown are {len(ranks)} of {len(everyone)} ranks: half of them those that"
        caption += " others waited for most, the others those that waited most."
    drawn = {f"{each.label} ({each.step})": _figure(summary, each, ranks) for each in steps}
    return Picture("timeline", title, caption, drawn)


def most_telling(summary: Summary, ranks: Sequence[int], *, most: int = _MOST_RANKS) -> list[int]:
    """All ranks; of too many, half that others waited for most, and half that waited most."""
    if len(ranks) <= most:
        return list(ranks)
    caused = {each.rank: each.waited_for_ms or 0.0 for each in summary.ranks}
    waited = {each.rank: each.wait_ms or 0.0 for each in summary.ranks}
    chosen = sorted(ranks, key=lambda rank: (-caused.get(rank, 0), rank))[: most // 2]
    rest = sorted(set(ranks) - set(chosen), key=lambda rank: (-waited.get(rank, 0), rank))
    return sorted([*chosen, *rest[: most - len(chosen)]])


def _figure(summary: Summary, step: Timeline, ranks: Sequence[int]) -> go.Figure:
    bars: dict[tuple[int, str], list[_Bar]] = defaultdict(list)
    ready: list[tuple[float, float, str]] = []
    hosts = {each.rank: f"<br>{figures.short(each.host)}" for each in summary.ranks}
    top, names = 0.0, {}
    for rank in ranks:
        spans = step.spans.get(rank, ())
        codec = [span for span in spans if span.phase != "exchange"]
        exchanges = [span for span in spans if span.phase == "exchange"]
        on_codec, on_exchange = (
            lanes([(span.begin, span.end) for span in of]) for of in (codec, exchanges)
        )
        middle = top + 1 + len({*on_codec})
        bottom = middle + len({*on_exchange})
        for phase, begin, end in step.phases.get(rank, ()):
            name, y = plain(phase), (top + bottom) / 2
            hover = f"rank {rank}: {name}, {_ms(end - begin)}"
            bars[_BEHIND, name].append((begin, end, y, bottom - top, "", hover))
            bars[_PHASE, name].append((begin, end, top + 0.5, 0.86, name, hover))
        for span, lane in zip(codec, on_codec, strict=True):
            hover = f"rank {rank}, bucket {span.bucket}<br>{plain(span.phase)}: "
            hover += _ms(span.end - span.begin)
            bar = (span.begin, span.end, top + 1.5 + lane, 0.86, str(span.bucket), hover)
            bars[_SPAN, "encode" if span.phase == "encode" else "decode"].append(bar)
        for span, lane in zip(exchanges, on_exchange, strict=True):
            for kind, begin, end, text, hover in _collective(span, rank):
                bars[_SPAN, kind].append((begin, end, middle + 0.5 + lane, 0.86, text, hover))
        for index, time, done in step.buckets.get(rank, ()):
            hover = f"rank {rank}, bucket {index}<br>gradients ready at {_ms(time)}, "
            ready.append((time / 1e6, top + 1, f"{hover}averaged at {_ms(done)}"))
        names[(top + bottom) / 2] = f"rank {rank}{hosts.get(rank, '')}"
        top = bottom + 0.6
    order = {name: place for place, name in enumerate((*PHASES, *_WORK))}
    keys = sorted(bars, key=lambda key: (key[0], order.get(key[1], len(order))))
    drawn = go.Figure([_trace(layer, name, bars[layer, name]) for layer, name in keys])
    if ready:
        x, heights, hovers = (list(of) for of in zip(*ready, strict=True))
        mark = {"symbol": "triangle-down", "size": 9, "color": INK}
        look = {"mode": "markers", "marker": mark, "name": "gradients of a bucket ready"}
        drawn.add_scatter(x=x, y=heights, hovertext=hovers, hovertemplate=HOVER, **look)
    ends = [bar[1] / 1e6 for of in bars.values() for bar in of]
    return figures.styled(
        drawn,
        round(165 + max(60, top * max(5.0, min(22.0, 1500 / top)))),
        barmode="overlay",
        xaxis={"title": "time in the step, ms", "range": [0, max(ends)]},
        yaxis={"range": [top - 0.3, -0.3], "showgrid": False},
        yaxis_tickvals=list(names),
        yaxis_ticktext=list(names.values()),
        uniformtext={"minsize": 8, "mode": "hide"},
    )


def _collective(span: TimelineSpan, rank: int) -> list[tuple[str, int, int, str, str]]:
    """A bar, or two where it is known when the last rank launched it."""
    hover = f"rank {rank}, bucket {span.bucket}<br>{plain(span.op)} in {plain(span.group)}, "
    hover += f"{format_value(span.sent, 'B')} sent<br>"
    if span.arrival is None:
        hover += f"{_ms(span.end - span.begin)}, wait not told apart"
        return [("exchange", span.begin, span.end, str(span.bucket), hover)]
    arrival = min(max(span.arrival, span.begin), span.end)  # clocks are never quite equal
    hover += f"wait {_ms(arrival - span.begin)}, transfer {_ms(span.end - arrival)}"
    parts = (("wait", span.begin, arrival), ("transfer", arrival, span.end))
    longest = max(parts, key=lambda part: part[2] - part[1])
    texts = (str(span.bucket) if part == longest else "" for part in parts)
    return [
        (*part, text, hover) for part, text in zip(parts, texts, strict=True) if part[1] < part[2]
    ]


def _trace(layer: int, name: str, bars: Sequence[_Bar]) -> go.Bar:
    begins, ends, y, heights, texts, hovers = (list(of) for of in zip(*bars, strict=True))
    fill = figures.fill("exposed_other" if name == "exchange" else name)
    return go.Bar(
        orientation="h",
        name=_WORK[name] if layer == _SPAN else name,
        base=[round(begin / 1e6, 3) for begin in begins],
        x=[round(max(b - a, 0) / 1e6, 3) for a, b in zip(begins, ends, strict=True)],
        y=y,
        width=heights,
        text=texts,
        hovertext=hovers,
        hovertemplate=HOVER,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        marker={**fill, "line": {"width": 0.5 if layer == _SPAN else 0, "color": LINE}},
        **_LOOKS[layer],
    )


def _ms(nanoseconds: int) -> str:
    return format_value(nanoseconds / 1e6, "ms")
