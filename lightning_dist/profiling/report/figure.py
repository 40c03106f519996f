"""A picture as plotly.js takes it, in colours that the page puts in.

A colour is named ``"--wait"``, like the variable in ``page.css``; the page looks it up whenever the
reader's scheme changes between light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Figure: TypeAlias = dict[str, Any]
"""``data`` and ``layout``."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

PATTERNS = {"wait": "/", "codec": "x", "unattributed": ".", "encode": "x", "decode": "."}
"""Beside the colours, for those who see them alike."""

HEAT = [[0, "--heat-0"], [0.25, "--heat-1"], [0.6, "--heat-2"], [1, "--heat-3"]]
"""One hue, from the colour of the paper on: its order needs no colour vision."""


def figure(data: Sequence[dict[str, Any]], *, height: int, **layout: Any) -> Figure:
    """A picture in the style of the page.

    Its tools stand in the right margin, over nothing; where a scale of colours is, above that.
    """
    upright = not any("colorbar" in trace for trace in data)
    return {
        "data": list(data),
        "layout": {
            "autosize": True,
            "height": height,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": FONT, "size": 13, "color": "--ink"},
            "margin": {"l": 60, "r": 44 if upright else 16, "t": 16, "b": 48},
            "modebar": {"orientation": "v" if upright else "h", "bgcolor": "rgba(0,0,0,0)"},
            "hoverlabel": {"bgcolor": "--raised", "bordercolor": "--line", "align": "left"},
            "hoverdistance": 30,
            "uirevision": "keep",
            **layout,
        },
    }


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis with its unit in its title."""
    return {
        "title": {"text": title, "standoff": 10},
        "automargin": True,
        "linecolor": "--line",
        "zeroline": False,
        **({} if more.get("showgrid") is False else {"gridcolor": "--grid"}),
        **more,
    }


def legend_above(**more: Any) -> dict[str, Any]:
    """A legend over the picture, in the order of the traces."""
    return {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 1.02,
        "yanchor": "bottom",
        "traceorder": "normal",
        **more,
    }


def fill(name: str, *, pattern: str | None = None) -> dict[str, Any]:
    """A bar's filling: the colour ``name``, and the pattern that goes with it."""
    shape = PATTERNS.get(name, "") if pattern is None else pattern
    if not shape:
        return {"color": f"--{name}"}
    look = {"shape": shape, "fgcolor": "--hatch", "fgopacity": 0.75, "size": 6, "solidity": 0.25}
    return {"color": f"--{name}", "pattern": {**look, "fillmode": "overlay"}}
