"""Measured bandwidth between hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.report.bins import digits
from lightning_dist.profiling.report.figure import HEAT, axis, figure
from lightning_dist.profiling.report.text import finite, label, number, plain, rate, why
from lightning_dist.profiling.report.view import Column, Picture, Table

_WRITTEN = 16
"""Up to so many hosts there is room for numbers in the fields."""


def links_between_hosts(summary: Summary) -> Picture:
    """Heat map of Gbit/s, from the row's host to the column's."""
    title, short = "Bandwidth between hosts", "Links"
    hosts = {each.rank: each.host for each in summary.ranks}
    pairs = [link for link in summary.links if link.get("peer") is not None]
    rates = _rates(pairs, hosts)
    if not rates:
        missing = f"n/a: {why(summary, 'links')}."
        if summary.links:
            missing = "n/a between two hosts: only whole groups of ranks were."
        return Picture("links", title, short, missing=missing)
    names = sorted({name for pair in rates for name in pair})
    caption = (
        "Gbit/s from the host of the row to that of the column, with nothing else on the link: all "
        "bits over all seconds of the measurement. A ring is as slow as its slowest link. The "
        "colours end at the fastest link between two hosts. Fields without a number were not "
        "measured."
    )
    drawn = figure(
        [_map(rates, names)],
        height=150 + max(110, min(44 * len(names), 720)),
        xaxis=_hosts(names, title="to", side="top"),
        yaxis=_hosts(names, title="from", autorange="reversed"),
    )
    return Picture("links", title, short, caption, drawn)


def links_of_groups(summary: Summary) -> Table | None:
    """Collectives that were measured on the idle link; None: there were none."""
    by_group = defaultdict(list)
    for link in summary.links:
        seconds = finite(link.get("seconds"))
        if link.get("peer") is None and seconds:
            by_group[str(link["group"])].append(float(link["sent"]) * 8 / seconds / 1e9)
    if not by_group:
        return None
    return Table(
        "groups",
        "Bandwidth of whole groups",
        "Groups",
        (
            Column("group", is_number=False),
            Column("measurements"),
            Column("slowest"),
            Column("fastest"),
        ),
        [
            (group, str(len(rates)), rate(min(rates)), rate(max(rates)))
            for group, rates in sorted(by_group.items())
        ],
        caption="What a rank sent in a collective of its group, with nothing else on the link.",
    )


def _rates(
    pairs: Sequence[Mapping[str, Any]], hosts: Mapping[int, str]
) -> dict[tuple[str, str], float]:
    sent: dict[tuple[str, str], float] = defaultdict(float)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for link in pairs:
        pair = _host(hosts, link["rank"]), _host(hosts, link["peer"])
        sent[pair] += link["sent"]
        seconds[pair] += link["seconds"]
    return {pair: sent[pair] * 8 / seconds[pair] / 1e9 for pair in sent if seconds[pair] > 0}


def _host(hosts: Mapping[int, str], rank: int) -> str:
    return hosts.get(rank, f"host of rank {rank}")


def _map(rates: Mapping[tuple[str, str], float], names: Sequence[str]) -> dict[str, Any]:
    between = [rate for (row, column), rate in rates.items() if row != column]
    values = [[rates.get((row, column)) for column in names] for row in names]
    return {
        "type": "heatmap",
        "x": list(range(len(names))),
        "y": list(range(len(names))),
        "z": [[None if value is None else digits(value) for value in row] for row in values],
        "zmin": 0,
        "zmax": digits(max(between or rates.values())),
        "text": [["" if value is None else number(value) for value in row] for row in values],
        "texttemplate": "%{text}" if len(names) <= _WRITTEN else "",
        "colorscale": HEAT,
        "colorbar": {"title": {"text": "Gbit/s"}, "thickness": 12, "outlinewidth": 0, "nticks": 5},
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
        "hovertext": [
            [
                f"{plain(row)} to {plain(column)}<br>{rate(rates.get((row, column)))}"
                for column in names
            ]
            for row in names
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _hosts(names: Sequence[str], *, title: str, **more: Any) -> dict[str, Any]:
    ticks = {"tickvals": list(range(len(names))), "ticktext": [label(name) for name in names]}
    return axis(title, showgrid=False, **ticks, **more)
