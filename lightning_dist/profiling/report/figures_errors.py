"""What compression loses, over steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.report.bins import FEW_BARS, bins, digits, middles, of_steps
from lightning_dist.profiling.report.figure import axis, figure, legend_above
from lightning_dist.profiling.report.text import finite, why
from lightning_dist.profiling.report.view import Picture

_ROWS = (
    ("relative_l2", "relative error", "--transfer", "circle"),
    ("cosine", "cosine", "--backward", "square"),
    ("residual_ratio", "residual ratio", "--codec", "diamond"),
)
"""Field, name, colour and mark of a curve."""

_DIGITS = 8  # a cosine differs from 1 in the fifth


def errors_over_time(summary: Summary) -> Picture:
    """Curves of the median over buckets and ranks, with the range as a band."""
    title, short = "Compression error", "Errors"
    found = [row for row in _ROWS if _by_step(summary.errors, row[0])]
    if not found:
        return Picture("errors", title, short, missing=f"n/a: {why(summary, 'errors')}.")
    caption = (
        "A curve is the median over the buckets and ranks that were looked at, the band around it "
        "goes from the smallest to the largest. None of these has a unit."
    )
    if "residual_ratio" not in [field for field, *_ in found]:
        caption += " There is no residual ratio: no residual was kept."
    height, gap = 170, 0.06
    share = (1 - gap * (len(found) - 1)) / len(found)
    layout: dict[str, Any] = {}
    data = []
    for i, row in enumerate(found):
        anchor = "" if i == 0 else str(i + 1)
        top = 1 - i * (share + gap)
        layout[f"yaxis{anchor}"] = axis(row[1], domain=[max(top - share, 0), top])
        data += _curve(_by_step(summary.errors, row[0]), row[1:], axis_name=f"y{anchor}")
    layout["xaxis"] = axis("step", anchor=f"y{len(found) if len(found) > 1 else ''}")
    drawn = figure(
        data, height=100 + height * len(found), legend=legend_above(), hovermode="closest", **layout
    )
    return Picture("errors", title, short, caption, drawn)


def _by_step(errors: Sequence[Mapping[str, Any]], field: str) -> dict[int, list[float]]:
    values = defaultdict(list)
    for error in errors:
        if (value := finite(error.get(field))) is not None:
            values[int(error["step"])].append(value)
    return dict(sorted(values.items()))


def _curve(
    values: Mapping[int, Sequence[float]], look: tuple[str, str, str], *, axis_name: str
) -> list[dict[str, Any]]:
    name, colour, symbol = look
    steps = list(values)
    runs = bins(len(steps))
    few = len(runs) <= FEW_BARS
    groups = [[value for step in steps[run] for value in values[step]] for run in runs]
    x = middles(steps, runs)
    middle = [digits(median(group), count=_DIGITS) for group in groups]
    line = {"type": "scatter", "x": x, "yaxis": axis_name}
    edge = {**line, "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    return [
        {**edge, "y": [digits(min(group), count=_DIGITS) for group in groups]},
        {
            **edge,
            "y": [digits(max(group), count=_DIGITS) for group in groups],
            "fill": "tonexty",
            "fillcolor": f"{colour}-band",
        },
        {
            **line,
            "mode": "lines+markers" if few else "lines",
            "name": name,
            "y": middle,
            "line": {"width": 2, "color": colour},
            **({"marker": {"symbol": symbol, "size": 6, "color": colour}} if few else {}),
            "hovertext": [
                f"{of_steps(steps, run=run)}<br>{name}: {value:.6g} "
                f"({min(group):.6g} to {max(group):.6g})"
                for run, value, group in zip(runs, middle, groups, strict=True)
            ],
            "hovertemplate": "%{hovertext}<extra></extra>",
        },
    ]
