"""The bars and marks of a time line, by what they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_dist.profiling.analysis.parts import Placed
from lightning_dist.profiling.capture.events import PHASES
from lightning_dist.profiling.report.figure import fill
from lightning_dist.profiling.report.text import megabytes, ms, plain

_NS = 1e6  # per millisecond
_BAR = 0.86  # of a lane

_NAMES = {
    "encode": "encode",
    "decode": "decode",
    "wait": "waiting for the last rank",
    "transfer": "transfer",
    "exchange": "exchange, arrivals unknown",
}
_COLOURS = {"exchange": "unattributed"}


@dataclass
class _Trace:
    """Bars of one kind."""

    base: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    width: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    hover: list[str] = field(default_factory=list)

    def add(self, begin: int, end: int, *, y: float, width: float, text: str, hover: str) -> None:
        self.base.append(_ms(begin))
        self.length.append(_ms(max(end - begin, 0)))
        self.y.append(y)
        self.width.append(width)
        self.text.append(text)
        self.hover.append(hover)

    def bars(self) -> dict[str, Any]:
        return {
            "type": "bar",
            "orientation": "h",
            "base": self.base,
            "x": self.length,
            "y": self.y,
            "width": self.width,
            "text": self.text,
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "hovertext": self.hover,
            "hovertemplate": "%{hovertext}<extra></extra>",
        }


class Bars:
    """Collects what is on a time line; lengths are nanoseconds, heights lanes."""

    def __init__(self) -> None:
        self._phases: dict[str, tuple[_Trace, _Trace]] = {}
        self._work: dict[str, _Trace] = {name: _Trace() for name in _NAMES}
        self._ready = _Marks()
        self._arrivals = _Marks()

    def phase(
        self, name: str, begin: int, end: int, *, rank: int, top: float, bottom: float, strip: float
    ) -> None:
        """A light background from ``top`` to ``bottom``, with its name in a strip on top."""
        behind, named = self._phases.setdefault(name, (_Trace(), _Trace()))
        told = f"rank {rank}: {plain(name)}, {_ms_of(begin, end)}"
        height = bottom - top
        behind.add(begin, end, y=top + height / 2, width=height, text="", hover=told)
        named.add(begin, end, y=top + strip / 2, width=strip * _BAR, text=plain(name), hover=told)

    def codec(self, span: Placed, *, rank: int, y: float) -> None:
        """Encoding or decoding."""
        told = f"rank {rank}, bucket {span.bucket}<br>{plain(span.phase)}"
        trace = self._work["encode" if span.phase == "encode" else "decode"]
        hover = f"{told}: {_ms_of(span.begin, span.end)}"
        trace.add(span.begin, span.end, y=y, width=_BAR, text=str(span.bucket), hover=hover)

    def exchange(self, span: Placed, *, rank: int, y: float) -> None:
        """A collective; in two parts if it is known when the last rank came to it."""
        told = f"rank {rank}, bucket {span.bucket}<br>{plain(span.op)} in {plain(span.group)}"
        told += f", {megabytes(span.sent)} sent<br>"
        text = str(span.bucket)
        if span.arrival is None:
            hover = f"{told}{_ms_of(span.begin, span.end)}; waiting not told apart"
            args = {"y": y, "width": _BAR}
            self._work["exchange"].add(span.begin, span.end, text=text, hover=hover, **args)
            return
        arrival = min(max(span.arrival, span.begin), span.end)  # clocks are never quite equal
        hover = f"{told}waiting {_ms_of(span.begin, arrival)}, transfer {_ms_of(arrival, span.end)}"
        parts = (("wait", span.begin, arrival), ("transfer", arrival, span.end))
        longest = max(parts, key=lambda part: part[2] - part[1])[0]
        for name, begin, end in parts:
            if begin < end:
                at = text if name == longest else ""
                self._work[name].add(begin, end, y=y, width=_BAR, text=at, hover=hover)
        self._arrivals.add(arrival, y, f"{told}the last rank has come at {ms(_ms(arrival))}")

    def ready(self, index: int, ready: int, done: int, *, rank: int, y: float) -> None:
        """A bucket's gradients are there."""
        told = f"rank {rank}, bucket {index}<br>gradients ready at {ms(_ms(ready))}"
        self._ready.add(ready, y, f"{told}, mean of all ranks at {ms(_ms(done))}")

    @property
    def end(self) -> float:
        """Where the last bar ends, in milliseconds."""
        phases = [trace for trace, _ in self._phases.values()]
        bars = [*phases, *self._work.values()]
        ends = (base + x for each in bars for base, x in zip(each.base, each.length, strict=True))
        return max(ends, default=0.0)

    def traces(self) -> list[dict[str, Any]]:
        """Backgrounds first."""
        known = [name for name in PHASES if name in self._phases]
        names = [*known, *sorted(self._phases.keys() - set(known))]
        found: list[dict[str, Any]] = []
        for strip in (0, 1):
            for name in names:
                colour = name if name in known else "other"
                found.append(
                    {
                        **self._phases[name][strip].bars(),
                        "name": plain(name),
                        "showlegend": bool(strip),
                        "marker": {"color": f"--{colour}", "line": {"width": 0}},
                        "opacity": 0.9 if strip else 0.16,
                    }
                )
        for name, trace in self._work.items():
            if trace.base:
                marker = fill(_COLOURS.get(name, name))
                marker["line"] = {"width": 0.5, "color": "--line"}
                found.append({**trace.bars(), "name": _NAMES[name], "marker": marker})
        if self._arrivals.x:
            found.append(self._arrivals.scatter("the last rank has come", "line-ns-open", size=14))
        if self._ready.x:
            found.append(self._ready.scatter("gradients of a bucket ready", "triangle-down"))
        return found


@dataclass
class _Marks:
    """Points in time."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    hover: list[str] = field(default_factory=list)

    def add(self, at: int, y: float, hover: str) -> None:
        self.x.append(_ms(at))
        self.y.append(y)
        self.hover.append(hover)

    def scatter(self, name: str, symbol: str, *, size: int = 9) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": self.x,
            "y": self.y,
            "marker": {
                "symbol": symbol,
                "size": size,
                "color": "--ink",
                "line": {"width": 2, "color": "--ink"},
            },
            "hovertext": self.hover,
            "hovertemplate": "%{hovertext}<extra></extra>",
        }


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / _NS, 3)


def _ms_of(begin: int, end: int) -> str:
    return ms(_ms(end - begin))
