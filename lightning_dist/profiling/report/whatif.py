"""What the step would be with other settings: a picture and a table of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.report.figure import Figure, axis, figure, fill, legend_above
from lightning_dist.profiling.report.text import number, plain, why
from lightning_dist.profiling.report.view import Column, Picture, Table, View
from lightning_dist.profiling.whatif.answer import LABEL, Prediction, WhatIf
from lightning_dist.profiling.whatif.told import (
    error_of,
    name_of,
    remarks,
    signed,
    sources,
    untold,
)

_TITLE = f"What would help: {LABEL}"
_COLUMNS = (
    Column("place"),
    Column("with", is_number=False),
    Column("step", "ms"),
    Column("exposed", "ms"),
    Column("sent by a host", "MB"),
    Column("change of the step"),
    Column("remark", is_number=False),
)


def whatif_views(summary: Summary) -> Sequence[View]:
    """Both, or the reason why there are none."""
    found = summary.whatif
    if found is None:
        missing = f"n/a: {why(summary, 'whatif', 'steps')}."
        return [Table("whatif", _TITLE, "What would help", _COLUMNS, (), missing=missing)]
    told = [each for each in found.others if each.step_ms is not None]
    table = Table(
        "whatif",
        _TITLE,
        "What would help",
        _COLUMNS,
        [_own(found), *(_row(each, found.current) for each in told)],
        _caption(found),
    )
    if found.margin is None or not told:
        return [table]
    picture = Picture(
        "whatif-steps",
        f"Step with other settings: {LABEL}",
        "Predicted steps",
        "All bars are predictions, that of the run itself too, beside which is what was measured. "
        f"The lines at their ends are the {100 * found.margin:.1f} % within which the model cannot "
        "tell.",
        _drawn(found, told, found.margin),
    )
    return [table, picture]


def _own(found: WhatIf) -> Sequence[str]:
    current = found.current
    error = "n/a" if found.error is None else signed(found.error)
    return (
        "",
        f"{name_of(current, current)}: this run",
        *map(number, (current.step_ms, current.exposed_ms, current.sent_mb)),
        "",
        f"measured {number(found.measured_ms)} ms; error of the model {error}",
    )


def _row(each: Prediction, current: Prediction) -> Sequence[str]:
    return (
        "" if each.place is None else str(each.place),
        name_of(each, current),
        *map(number, (each.step_ms, each.exposed_ms, each.sent_mb)),
        "n/a" if each.change is None else signed(each.change),
        remarks(each),
    )


def _caption(found: WhatIf) -> str:
    current, inside = found.current, found.link.get("inside_gbps")
    where = (
        f"{current.world_size} ranks on one host, {number(current.gbps)} Gbit/s of each, no network"
    )
    if current.hosts > 1:
        where = (
            f"{current.world_size} ranks on {current.hosts} hosts, {number(current.gbps)} Gbit/s "
            "between them"
        )
        where += f", {number(inside)} Gbit/s inside" if inside else ""
    sentences = [
        f"The step of this run, played with other settings: {where}",
        error_of(found).rstrip("."),
        "Settings with the same place are not told apart. It is about time only: some codecs need "
        "more steps to the same accuracy",
        *sources([current, *found.others]),
        *(f"{name}: n/a, {reason}" for name, reason in found.reasons.items()),
        *untold(found.others),
    ]
    return " ".join(f"{each[:1].upper()}{each[1:]}." for each in sentences)


def _drawn(found: WhatIf, told: Sequence[Prediction], margin: float) -> Figure:
    current = found.current
    own = f"{plain(name_of(current, current))} (this run)"
    names = [own, *(plain(name_of(each, current)) for each in told)]
    steps = [each.step_ms or 0.0 for each in (current, *told)]
    exposed = [each.exposed_ms or 0.0 for each in (current, *told)]
    rest = [step - of_it for step, of_it in zip(steps, exposed, strict=True)]
    errors = {"type": "data", "array": [margin * step for step in steps]}
    bars: list[dict[str, Any]] = [
        _bars("compute, and what it hides", names, rest, fill("backward")),
        {
            **_bars("exposed communication", names, exposed, fill("transfer")),
            "error_x": {**errors, "color": "--ink", "thickness": 1.5},
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "measured",
            "y": [own],
            "x": [found.measured_ms],
            "marker": {"symbol": "diamond", "size": 11, "color": "--ink"},
            "hovertemplate": "%{y}<br>measured: %{x:,.3~r} ms<extra></extra>",
        },
    ]
    return figure(
        bars,
        height=110 + 26 * len(names),
        barmode="stack",
        xaxis=axis("milliseconds per step", rangemode="tozero"),
        yaxis=axis(
            type="category",
            autorange="reversed",
            showgrid=False,
            tickmode="array",  # plotly leaves out every other one
            tickvals=names,
        ),
        legend=legend_above(),
        hovermode="closest",
    )


def _bars(
    name: str, names: Sequence[str], values: Sequence[float], marker: dict[str, Any]
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(names),
        "x": list(values),
        "marker": marker,
        "hovertemplate": f"%{{y}}<br>{name}: %{{x:,.3~r}} ms<extra></extra>",
    }
