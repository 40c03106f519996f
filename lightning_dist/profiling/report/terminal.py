"""A summary for people at a terminal, or for the log of a job."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_dist.console import stdout_console
from lightning_dist.profiling.analysis.headline import count, milliseconds, percent
from lightning_dist.profiling.analysis.parts import EXPOSED, PARTS, RankSummary, Summary, Traffic
from lightning_dist.profiling.analysis.tables import MB
from lightning_dist.profiling.whatif.answer import LABEL, WhatIf
from lightning_dist.profiling.whatif.told import error_of, name_of, remarks, signed

_MANY = 8
_WORST = 4
_BEST = 4
"""Predictions."""


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Headline, parts of the step, traffic, ranks, predictions, notes."""
    if console is None:
        console = stdout_console()
    console.print(Text(summary.headline, style="bold"))
    if summary.steps:
        console.print(_overview(summary))
        if len(summary.ranks) > 1:
            _print_ranks(summary, console)
        if summary.whatif is not None:
            _print_whatif(summary.whatif, console)
    for note in summary.notes:
        console.print(Text(f"note: {note}"))


def _overview(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, value: str, remark: str = "", style: str = "") -> None:
        table.add_row(Text(name, style=style), Text(value), Text(remark))

    step = summary.step_ms
    skipped = f", without the first {summary.skipped}" if summary.skipped else ""
    ranks = f"mean of {len(summary.ranks)} ranks; " if len(summary.ranks) > 1 else "mean; "
    row(
        f"all {summary.steps} steps" if summary.steps > 1 else "the one step",
        milliseconds(step["mean"]),
        f"{ranks}median {milliseconds(step['median'])}, p95 {milliseconds(step['p95'])}{skipped}",
    )
    total = summary.parts_step_ms
    if total is not None:
        in_detail = "" if "parts_ms" in summary.reasons else " in detail"
        remark = f"{ranks}of {count(summary.parts_steps, 'step')}; its parts:"
        row(f"step{in_detail}", milliseconds(total), remark, style="bold")
    for name in PARTS:
        style = "yellow" if name in EXPOSED else ""
        of_part = summary.parts_ms.get(name)
        if of_part is None:
            because = summary.reasons.get(name if name in summary.parts_ms else "parts_ms", "")
            row(f"  {name}", "n/a", because, style)
        else:
            exposed = ", exposed" if name in EXPOSED else ""
            share = percent(of_part / (total or 1.0))
            row(f"  {name}", milliseconds(of_part), f"{share}{exposed}", style)
    if summary.overlap is None or summary.hidden_ms is None:
        row("hidden", "n/a", summary.reasons.get("overlap", ""))
    else:
        row("hidden", milliseconds(summary.hidden_ms), f"{percent(summary.overlap)} of exchanges")
    if summary.traffic is None:
        row("sent", "n/a", summary.reasons.get("traffic", ""))
    else:
        _add_traffic(table, summary, summary.traffic)
    if summary.overhead is None:
        row("profiler", "n/a", summary.reasons.get("overhead", ""))
    else:
        row("profiler", percent(summary.overhead), "of the time")
    if "whatif" in summary.reasons:
        row("what if", "n/a", summary.reasons["whatif"])
    return table


def _add_traffic(table: Table, summary: Summary, traffic: Traffic) -> None:
    sent, raw = traffic.wire_bytes / MB, traffic.raw_bytes / MB
    fewer = f"{traffic.ratio:.3g} times less than {raw:.3g} MB uncompressed"
    whose = "rank" if summary.is_of_all else "rank that has left steps"
    remark = f"per step and {whose}, {fewer if traffic.ratio > 1.005 else 'uncompressed'}"
    table.add_row("sent", f"{sent:.3g} MB", remark)
    inside = ", inside a host: no network" if len(set(summary.run.get("hosts", ()))) == 1 else ""
    for name, label, remark in (
        ("wire_gbps", "rate", "Gbit/s of what was sent"),
        ("effective_gbps", "  effective", "Gbit/s of uncompressed bytes in this time"),
        ("peak_gbps", "  link", f"Gbit/s at best{inside}"),
    ):
        value = getattr(traffic, name)
        if value is None:
            table.add_row(label, "n/a", Text(summary.reasons.get(f"traffic.{name}", "")))
        else:
            table.add_row(label, f"{value:.3g}", remark)
    if traffic.link_utilization is not None:
        table.add_row("  use of link", percent(traffic.link_utilization), "")


def _print_ranks(summary: Summary, console: Console) -> None:
    phases = [each.phase for each in summary.uneven]
    shown: Sequence[RankSummary] = summary.ranks
    if len(shown) > _MANY:
        shown = _worst(summary)
        which = f"the longest and the shortest in {', '.join(phases)}, and " if phases else ""
        console.print(
            f"{len(shown)} of {len(summary.ranks)} ranks, {which}those others waited for the most:"
        )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rank", "host", "step", "exposed", "waits", "others wait", "clock"):
        table.add_column(column, justify="left" if column == "host" else "right", no_wrap=True)
    for each in shown:
        table.add_row(
            Text(str(each.rank), style="red" if each.rank == summary.straggler else ""),
            Text(each.host),
            milliseconds(each.step_ms),
            milliseconds(each.exposed_ms),
            milliseconds(each.wait_ms),
            milliseconds(each.caused_ms),
            _clock(each.clock_uncertainty_ms),
        )
    console.print(table)
    console.print(Text("waits, others wait: hidden or not; the part wait is what is exposed of it"))
    if phases:
        _print_phases(shown, phases, console)


def _clock(uncertainty: float | None) -> str:
    """With two digits: more would be noise."""
    if uncertainty is None:
        return ""
    return f"± {milliseconds(float(f'{uncertainty:.2g}'))}" if uncertainty else "the same"


def _print_phases(ranks: Sequence[RankSummary], phases: Sequence[str], console: Console) -> None:
    """Beside the rest of them there would be no room for the names of hosts."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rank", *phases):
        table.add_column(column, justify="right", no_wrap=True)
    for each in ranks:
        of_rank = (milliseconds(each.phases_ms.get(name)) for name in phases)
        table.add_row(str(each.rank), *of_rank)
    console.print("phases in which ranks differ, outside of exchanges:")
    console.print(table)


def _worst(summary: Summary) -> list[RankSummary]:
    uneven = {rank for each in summary.uneven for rank in (each.ranks[0], each.than)}

    def order(each: RankSummary) -> tuple[bool, float, int]:
        return each.rank not in uneven, -(each.caused_ms or 0), each.rank

    return sorted(summary.ranks, key=order)[:_WORST]


def _print_whatif(found: WhatIf, console: Console) -> None:
    """The run as the model has it, and the best of the rest; the page has all."""
    told = [each for each in found.others if each.step_ms is not None]
    console.print(Text(f"{LABEL}. {error_of(found)}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", justify="right")
    table.add_column("with", no_wrap=True)
    for column in ("step", "exposed", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for each in told[:_BEST]:
        table.add_row(
            "" if each.place is None else str(each.place),
            Text(name_of(each, found.current)),
            milliseconds(each.step_ms or 0.0),
            milliseconds(each.exposed_ms or 0.0),
            "n/a" if each.change is None else signed(each.change),
            Text(remarks(each)),
        )
    console.print(table)
