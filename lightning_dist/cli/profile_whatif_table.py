"""What ``lightning-dist profile whatif`` prints."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_dist.profiling.whatif.predict import LABEL, Prediction, WhatIf

_WIDE = 10_000
"""Columns where nobody has a terminal: a line of the table stays a line."""


def print_whatif(found: WhatIf) -> None:
    """The run and the error first, then what was asked."""
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    for line in _head(found):
        console.print(Text(line))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", justify="right")
    for column in ("codec", "form"):
        table.add_column(column, no_wrap=True)
    for column in ("hosts", "Gbit/s", "step", "exposed", "sent", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for each in found.others:
        table.add_row(*(Text(cell) for cell in _cells(each)))
    console.print(table)
    for line in _sources(found):
        console.print(Text(line))
    for name, reason in found.reasons.items():
        console.print(Text(f"note: {name}: n/a, {reason}"))


def _head(found: WhatIf) -> list[str]:
    current = found.current
    run = f"{current.codec}, {current.form}, {current.hosts} hosts, {current.gbps:.3g} Gbit/s"
    if found.error is None or found.margin is None or current.step_ms is None:
        error = f"The model says nothing of the run itself: {current.reason}; so nothing is ranked."
    else:
        error = (
            f"The model says {current.step_ms:.1f} ms of it, {_percent(found.error)}. Steps within "
            f"{100 * found.margin:.1f} % are not told apart."
        )
    return [f"Measured: {found.measured_ms:.1f} ms a step ({run}).", error, f"{LABEL}:"]


def _sources(found: WhatIf) -> list[str]:
    """Where the costs of codecs are from."""
    names: dict[str, list[str]] = {}
    for each in found.others:
        of_source = names.setdefault(each.source, [])
        if each.source and each.codec not in of_source:
            of_source.append(each.codec)
    return [
        f"note: what {', '.join(codecs)} cost: {source}"
        for source, codecs in names.items()
        if codecs
    ]


def _cells(each: Prediction) -> tuple[str, ...]:
    def figure(value: float | None, unit: str) -> str:
        return "n/a" if value is None else f"{value:.1f} {unit}"

    remarks = (each.reason, each.verdict, each.assumes and f"for {each.assumes}")
    return (
        "" if each.place is None else str(each.place),
        each.codec,
        each.form,
        str(each.hosts),
        f"{each.gbps:.3g}",
        figure(each.step_ms, "ms"),
        figure(each.exposed_ms, "ms"),
        figure(each.sent_mb, "MB"),
        "n/a" if each.change is None else _percent(each.change),
        "; ".join(remark for remark in remarks if remark),
    )


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"
