"""What ``lightning-dist bench`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Table

from lightning_dist.console import stdout_console

if TYPE_CHECKING:
    from lightning_dist.cli.bench_run import Report

_RIGHT = ("count", "median", "min", "max", "algbw", "busbw", "% of best")
LEGEND = (
    "algbw = size / median time, busbw = algbw * factor, as nccl-tests defines them: 2(n-1)/n for "
    "all_reduce, (n-1)/n for all_gather and all_to_all, 1 for broadcast. busbw is comparable with "
    "the rate of the link. Times are of the slowest rank; Gbit/s are 10^9 bits."
)


def print_report(report: Report) -> None:
    """A heading and a table."""
    console = stdout_console()
    hosts = list(dict.fromkeys(report.hosts[rank] for rank in report.ranks))
    names = ", ".join(hosts) if len(hosts) <= 8 else f"{', '.join(hosts[:8])}, ..."
    console.print(
        f"{len(report.ranks)} ranks ({report.scope}) on {names}; {report.backend}, {report.device}",
        markup=False,
    )
    if report.pair_gbps is None:
        console.print(_of_rows(report))
        console.print(LEGEND, markup=False)
        return
    assert report.pair_nbytes is not None
    console.print(_of_pairs(report, report.pair_gbps))
    console.print(_weakest(report, report.pair_gbps), markup=False)


def _of_rows(report: Report) -> Table:
    columns = ("op", "size", "count", "dtype", "median", "min", "max", "algbw", "busbw")
    table = _table(*columns, "% of best")
    best = max(each.busbw_gbps for each in report.rows)
    for each in report.rows:
        table.add_row(
            each.op,
            decimal(each.nbytes),
            str(each.count),
            "float32",
            *(_time(seconds) for seconds in (each.median, min(each.seconds), max(each.seconds))),
            *(f"{rate:.3f} Gbit/s" for rate in (each.algbw_gbps, each.busbw_gbps)),
            f"{each.busbw_gbps / best:.0%}",
        )
    return table


def _of_pairs(report: Report, rates: Sequence[Sequence[float | None]]) -> Table:
    names = [f"{rank} {report.hosts[rank]}" for rank in report.ranks]
    table = _table("Gbit/s from \\ to", *names)
    for name, row in zip(names, rates, strict=True):
        table.add_row(name, *("-" if rate is None else f"{rate:.3f}" for rate in row))
    return table


def _weakest(report: Report, rates: Sequence[Sequence[float | None]]) -> str:
    of_pairs = [
        (rate, report.ranks[i], report.ranks[j])
        for i, row in enumerate(rates)
        for j, rate in enumerate(row)
        if rate is not None
    ]
    (slowest, source, target), (fastest, *_) = min(of_pairs), max(of_pairs)
    return (
        f"slowest: rank {source} on {report.hosts[source]} to rank {target} on "
        f"{report.hosts[target]}, {slowest:.3f} Gbit/s, {slowest / fastest:.0%} of the fastest; "
        f"{decimal(report.pair_nbytes or 0)} each, one pair at a time"
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column in _RIGHT or column[0].isdigit()
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds < 10 else f"{seconds:.1f} s"
