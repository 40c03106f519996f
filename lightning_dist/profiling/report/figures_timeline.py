"""One step on all ranks, as bars on the time line that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dist.profiling.analysis.intervals import lanes
from lightning_dist.profiling.analysis.parts import Placed, Summary, Timeline
from lightning_dist.profiling.report.bars import Bars
from lightning_dist.profiling.report.figure import axis, figure, legend_above
from lightning_dist.profiling.report.text import label, why
from lightning_dist.profiling.report.view import Picture

MOST_RANKS = 16

_STRIP = 1.0  # height of the phases' names, in lanes
_GAP = 0.6


@dataclass(frozen=True)
class _Band:
    """Where a rank is: its strip of phases, then lanes of codec work, then lanes of exchanges."""

    top: float
    codec: int
    exchange: int

    @property
    def bottom(self) -> float:
        return self.top + _STRIP + self.codec + self.exchange

    def codec_lane(self, lane: int) -> float:
        """The middle of it."""
        return self.top + _STRIP + lane + 0.5

    def exchange_lane(self, lane: int) -> float:
        """The middle of it."""
        return self.top + _STRIP + self.codec + lane + 0.5


def timelines_of(summary: Summary, timelines: Sequence[Timeline]) -> list[Picture]:
    """A picture of each."""
    if not timelines:
        missing = f"n/a: {why(summary, 'step_ms')}."
        return [Picture("timeline-0", "Time line of a step", "Time line", missing=missing)]
    return [_picture(summary, each, number) for number, each in enumerate(timelines)]


def _picture(summary: Summary, timeline: Timeline, number: int) -> Picture:
    title = f"Time line of step {timeline.step}: {timeline.label}"
    names = f"timeline-{number}", title, f"Time line {number + 1}" if number else "Time line"
    everyone = sorted({*timeline.phases, *timeline.buckets, *timeline.spans})
    if not any(timeline.phases.values()) and not any(timeline.spans.values()):
        because = why(summary, "buckets")
        missing = f"Nothing was recorded inside this step: {because}."
        return Picture(*names, missing=missing)
    ranks = shown(summary, everyone)
    caption = (
        "Under the phases of every rank: codec work, and below it exchanges, from the time this "
        "rank came to them to their end. A bar has the number of its bucket, where there is room. "
        "Waiting ends when the last rank has come. What lies behind a rank's last triangle is "
        "exposed. Time counts from the begin of the step on the first rank that began it."
    )
    if not any(timeline.spans.values()):
        caption = "Only phases: buckets and exchanges of this step were not recorded."
    if len(ranks) < len(everyone):
        caption += (
            f" These are {len(ranks)} of {len(everyone)} ranks: those that others waited for "
            "most, and those that waited most."
        )
    return Picture(*names, caption, _draw(summary, timeline, ranks))


def shown(summary: Summary, ranks: Sequence[int], *, most: int = MOST_RANKS) -> list[int]:
    """All ranks; of too many, half that others waited for most, and half that waited most."""
    if len(ranks) <= most:
        return list(ranks)
    caused = {each.rank: each.caused_ms or 0.0 for each in summary.ranks}
    waited = {each.rank: each.wait_ms or 0.0 for each in summary.ranks}
    chosen = sorted(ranks, key=lambda rank: (-caused.get(rank, 0), rank))[: most // 2]
    rest = sorted(set(ranks) - set(chosen), key=lambda rank: (-waited.get(rank, 0), rank))
    return sorted([*chosen, *rest[: most - len(chosen)]])


def _draw(summary: Summary, timeline: Timeline, ranks: Sequence[int]) -> dict[str, Any]:
    codec = {
        rank: [each for each in timeline.spans.get(rank, ()) if each.phase != "exchange"]
        for rank in ranks
    }
    exchange = {
        rank: [each for each in timeline.spans.get(rank, ()) if each.phase == "exchange"]
        for rank in ranks
    }
    bars = Bars()
    top = 0.0
    ticks: list[float] = []
    for rank in ranks:
        codec_lanes, exchange_lanes = _lanes(codec[rank]), _lanes(exchange[rank])
        band = _Band(top, len({*codec_lanes}), len({*exchange_lanes}))
        for name, begin, end in timeline.phases.get(rank, ()):
            bars.phase(name, begin, end, rank=rank, top=band.top, bottom=band.bottom, strip=_STRIP)
        for span, lane in zip(codec[rank], codec_lanes, strict=True):
            bars.codec(span, rank=rank, y=band.codec_lane(lane))
        for span, lane in zip(exchange[rank], exchange_lanes, strict=True):
            bars.exchange(span, rank=rank, y=band.exchange_lane(lane))
        for index, ready, done in timeline.buckets.get(rank, ()):
            bars.ready(index, ready, done, rank=rank, y=band.top + _STRIP)
        ticks.append((band.top + band.bottom) / 2)
        top = band.bottom + _GAP
    pixels = max(5.0, min(22.0, 1500 / top))  # per lane
    hosts = {each.rank: each.host for each in summary.ranks}
    names = [
        f"rank {rank}<br>{label(hosts[rank])}" if rank in hosts else f"rank {rank}"
        for rank in ranks
    ]
    return figure(
        bars.traces(),
        height=round(165 + max(pixels * top, 60)),
        barmode="overlay",
        xaxis=axis("time in the step, ms", range=[0, bars.end]),
        yaxis=axis(
            tickvals=ticks, ticktext=names, range=[top - _GAP / 2, -_GAP / 2], showgrid=False
        ),
        legend=legend_above(),
        uniformtext={"minsize": 8, "mode": "hide"},
        hovermode="closest",
    )


def _lanes(spans: Sequence[Placed]) -> list[int]:
    return lanes([(span.begin, span.end) for span in spans])
