"""Time line of a step: what every rank did, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from lightning_dist.profiling.analysis.lanes import count, lanes
from lightning_dist.profiling.analysis.metrics import format_value, why
from lightning_dist.profiling.analysis.parts import Placed, Summary, Timeline
from lightning_dist.profiling.capture.records import PHASES
from lightning_dist.profiling.report.figures import (
    HOVER,
    INK,
    LINE,
    Picture,
    fill,
    plain,
    short,
    styled,
)

_MOST_RANKS = 16


def timeline(summary: Summary, steps: Sequence[Timeline]) -> Picture:
    """One step on all ranks, of several to choose from."""
    title = "Time line of a step"
    if not steps:
        missing = f"n/a: {why(summary.reasons, 'step_ms')}."
        return Picture("timeline", title, missing=missing)
    if not any(of for each in steps for of in (*each.phases.values(), *each.spans.values())):
        missing = f"Nothing was recorded inside this step: {why(summary.reasons, 'buckets')}."
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
        caption += (
            f" Shown are {len(ranks)} of {len(everyone)} ranks: those waited for most, and those "
            "that waited most."
        )
    drawn = {f"{each.label} ({each.step})": _timeline(summary, each, ranks) for each in steps}
    return Picture("timeline", title, caption, drawn)


def most_telling(summary: Summary, ranks: Sequence[int], *, most: int = _MOST_RANKS) -> list[int]:
    """All ranks; of too many, half that others waited for most, and half that waited most."""
    if len(ranks) <= most:
        return list(ranks)
    caused = {each.rank: each.caused_ms or 0.0 for each in summary.ranks}
    waited = {each.rank: each.wait_ms or 0.0 for each in summary.ranks}
    chosen = sorted(ranks, key=lambda rank: (-caused.get(rank, 0), rank))[: most // 2]
    rest = sorted(set(ranks) - set(chosen), key=lambda rank: (-waited.get(rank, 0), rank))
    return sorted([*chosen, *rest[: most - len(chosen)]])


_Bar = tuple[int, int, float, float, str, str]
"""Begin and end in nanoseconds, middle and height in lanes, text and hover text."""

_KINDS = {
    "encode": "encode",
    "decode": "decode",
    "wait": "wait for the last rank",
    "transfer": "transfer",
    "exchange": "collective, launches not known",
}


def _timeline(summary: Summary, step: Timeline, ranks: Sequence[int]) -> go.Figure:
    phases: dict[str, list[_Bar]] = {name: [] for name in PHASES}
    behind: dict[str, list[_Bar]] = {name: [] for name in PHASES}
    work: dict[str, list[_Bar]] = {kind: [] for kind in _KINDS}
    ready: list[tuple[int, float, str]] = []
    top, ticks = 0.0, {}
    hosts = {each.rank: f"<br>{short(each.host)}" for each in summary.ranks}
    for rank in ranks:
        spans = step.spans.get(rank, ())
        codec = [span for span in spans if span.phase != "exchange"]
        exchanges = [span for span in spans if span.phase == "exchange"]
        on_codec, on_exchange = (
            lanes([(span.begin, span.end) for span in of]) for of in (codec, exchanges)
        )
        middle = top + 1 + count(on_codec)
        bottom = middle + count(on_exchange)
        for name, begin, end in step.phases.get(rank, ()):
            label = plain(name)
            hover = f"rank {rank}: {label}, {_ms(end - begin)}"
            bar = (begin, end, (top + bottom) / 2, bottom - top, "", hover)
            behind.setdefault(label, []).append(bar)
            phases.setdefault(label, []).append((begin, end, top + 0.5, 0.86, label, hover))
        for span, lane in zip(codec, on_codec, strict=True):
            hover = f"rank {rank}, bucket {span.bucket}<br>{plain(span.phase)}: "
            hover += _ms(span.end - span.begin)
            bar = (span.begin, span.end, top + 1.5 + lane, 0.86, str(span.bucket), hover)
            work["encode" if span.phase == "encode" else "decode"].append(bar)
        for span, lane in zip(exchanges, on_exchange, strict=True):
            for kind, bar in _collective(span, rank=rank, y=middle + 0.5 + lane):
                work[kind].append(bar)
        for index, time, done in step.buckets.get(rank, ()):
            hover = f"rank {rank}, bucket {index}<br>gradients ready at {_ms(time)}, "
            ready.append((time, top + 1, f"{hover}averaged at {_ms(done)}"))
        ticks[(top + bottom) / 2] = f"rank {rank}{hosts.get(rank, '')}"
        top = bottom + 0.6
    traces = [
        *(_bars(of, name, name, opacity=0.16, showlegend=False) for name, of in behind.items()),
        *(_bars(of, name, name, opacity=0.9) for name, of in phases.items()),
        *(_bars(of, _KINDS[kind], kind) for kind, of in work.items()),
    ]
    traces = [each for each in traces if each.x]
    end = max((base + x for each in traces for base, x in zip(each.base, each.x, strict=True)))
    if ready:
        traces.append(
            go.Scatter(
                mode="markers",
                name="gradients of a bucket ready",
                x=[time / 1e6 for time, *_ in ready],
                y=[y for _, y, _ in ready],
                hovertext=[hover for *_, hover in ready],
                hovertemplate=HOVER,
                marker={"symbol": "triangle-down", "size": 9, "color": INK},
            )
        )
    names = {"tickvals": list(ticks), "ticktext": list(ticks.values())}
    return styled(
        go.Figure(traces),
        round(165 + max(60, top * max(5.0, min(22.0, 1500 / top)))),
        barmode="overlay",
        xaxis={"title": "time in the step, ms", "range": [0, end]},
        yaxis={"range": [top - 0.3, -0.3], "showgrid": False, **names},
        uniformtext={"minsize": 8, "mode": "hide"},
    )


def _collective(span: Placed, *, rank: int, y: float) -> list[tuple[str, _Bar]]:
    """A bar, or two where it is known when the last rank launched it."""
    hover = f"rank {rank}, bucket {span.bucket}<br>{plain(span.op)} in {plain(span.group)}, "
    hover += f"{format_value(span.sent, 'B')} sent<br>"
    text = str(span.bucket)
    if span.arrival is None:
        hover += f"{_ms(span.end - span.begin)}, wait not told apart"
        return [("exchange", (span.begin, span.end, y, 0.86, text, hover))]
    arrival = min(max(span.arrival, span.begin), span.end)  # clocks are never quite equal
    hover += f"wait {_ms(arrival - span.begin)}, transfer {_ms(span.end - arrival)}"
    parts = (("wait", span.begin, arrival), ("transfer", arrival, span.end))
    longest = max(parts, key=lambda part: part[2] - part[1])
    return [
        (part[0], (*part[1:], y, 0.86, text if part == longest else "", hover))
        for part in parts
        if part[1] < part[2]
    ]


def _bars(bars: Sequence[_Bar], name: str, color: str, **more: Any) -> go.Bar:
    color = "unattributed" if color == "exchange" else color
    return go.Bar(
        orientation="h",
        name=name,
        base=[round(begin / 1e6, 3) for begin, *_ in bars],
        x=[round(max(end - begin, 0) / 1e6, 3) for begin, end, *_ in bars],
        y=[each[2] for each in bars],
        width=[each[3] for each in bars],
        text=[each[4] for each in bars],
        hovertext=[each[5] for each in bars],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        marker={**fill(color), "line": {"width": 0.5 if not more else 0, "color": LINE}},
        hovertemplate=HOVER,
        **more,
    )


def _ms(nanoseconds: int) -> str:
    return format_value(nanoseconds / 1e6, "ms")
