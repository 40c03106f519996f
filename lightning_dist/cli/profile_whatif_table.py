"""What ``lightning-dist profile whatif`` prints."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from lightning_dist.console import stdout_console
from lightning_dist.profiling.whatif.answer import LABEL, THIS_RUN, Prediction, WhatIf
from lightning_dist.profiling.whatif.told import (
    error_of,
    remarks,
    signed,
    sources,
    untold,
    where_of,
)


def print_whatif(found: WhatIf) -> None:
    """The run and the error first, then what was asked."""
    console = stdout_console()
    for line in _head(found):
        console.print(Text(line))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", justify="right")
    for column in ("codec", "form"):
        table.add_column(column, no_wrap=True)
    table.add_column("bucket", justify="right", no_wrap=True)
    for column in ("hosts", "Gbit/s", "step", "exposed", "sent", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for each in found.others:
        if each.step_ms is not None:
            table.add_row(*(Text(cell) for cell in _cells(each)))
    console.print(table)
    for line in (*_compared(found), *untold(found.others)):
        console.print(Text(f"note: {line}"))
    for line in sources(found.others):
        console.print(Text(f"note: {line}"))
    for name, reason in found.reasons.items():
        console.print(Text(f"note: {name}: n/a, {reason}"))


def _compared(found: WhatIf) -> list[str]:
    """With what, where other links or hosts were asked about."""
    if found.against == THIS_RUN:
        return []
    among = "places are among settings with the same link and hosts"
    return [f"change: against {found.against}; {among}"]


def _head(found: WhatIf) -> list[str]:
    current = found.current
    run = f"{current.codec}, {current.form}, {where_of(found)}"
    measured = f"Measured: {found.measured_ms:.1f} ms a step ({run})."
    return [measured, error_of(found), f"{LABEL}:"]


def _cells(each: Prediction) -> tuple[str, ...]:
    def figure(value: float | None, unit: str) -> str:
        return "n/a" if value is None else f"{value:.1f} {unit}"

    return (
        "" if each.place is None else str(each.place),
        each.codec,
        each.form,
        "" if each.bucket_mb is None else f"{each.bucket_mb:g} MB",
        str(each.hosts),
        f"{each.gbps:.3g}",
        figure(each.step_ms, "ms"),
        figure(each.exposed_ms, "ms"),
        figure(each.sent_mb, "MB"),
        "n/a" if each.change is None else signed(each.change),
        remarks(each),
    )
