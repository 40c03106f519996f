"""Numbers and words for people. Units are decimal: 1 MB is a million bytes, 1 Gbit/s a billion."""

from __future__ import annotations

import html
import math
from typing import Any

from lightning_dist.profiling.analysis.parts import Summary

MISSING = "n/a"
"""In a cell of a table: not measured."""

_LONGEST_LABEL = 24


def finite(value: Any) -> float | None:
    """``value`` as a number that can be drawn; None for everything else, NaN among it."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def number(value: float | None) -> str:
    """Three digits that mean something."""
    value = finite(value)
    if value is None:
        return MISSING
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    if size >= 0.001:
        return f"{value:#.3g}"
    return f"{value:.1g}" if size else "0"


def ms(value: float | None) -> str:
    """Milliseconds."""
    return _with_unit(value, "ms")


def percent(share: float | None) -> str:
    """A share of 0 to 1."""
    share = finite(share)
    if share is None:
        return MISSING
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 10 else f"{float(f'{value:.2g}'):g} %"


def megabytes(nbytes: float | None) -> str:
    """Bytes, in the unit that fits."""
    nbytes = finite(nbytes)
    if nbytes is None:
        return MISSING
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return _with_unit(nbytes / size, unit)
    return _with_unit(nbytes, "bytes")


def rate(gbps: float | None) -> str:
    """Bits per second, in the unit that fits."""
    if (value := finite(gbps)) is not None and value < 1:
        return _with_unit(value * 1e3, "Mbit/s")
    return _with_unit(gbps, "Gbit/s")


def _with_unit(value: float | None, unit: str) -> str:
    return MISSING if finite(value) is None else f"{number(value)} {unit}"


def plain(text: Any) -> str:
    """Text from the run, for a picture: plotly reads tags in labels, and these are none."""
    return html.escape(str(text), quote=False)


def label(text: str) -> str:
    """:func:`plain`, and short enough to stand beside an axis."""
    return plain(text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 1]}…")


def why(summary: Summary, *names: str) -> str:
    """The reason of the first of these fields that has one."""
    found = (summary.reasons[name] for name in names if name in summary.reasons)
    return next(found, "no reason was recorded")
