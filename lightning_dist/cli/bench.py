"""``lightning-dist bench``: how fast ranks exchange bytes, with the options of nccl-tests."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.filesize import decimal

from lightning_dist.base.console import print_lines, print_table
from lightning_dist.cli.command import BAD_INPUT, Json, print_json, reported
from lightning_dist.profiling.analysis.metrics import format_value

if TYPE_CHECKING:
    from lightning_dist.cli.bench_run import BenchReport

LEGEND = (
    "algbw = size / median time, busbw = algbw * factor, as nccl-tests defines them: 2(n-1)/n for "
    "all_reduce, (n-1)/n for all_gather and all_to_all, 1 for broadcast. busbw is comparable with "
    "the rate of the link. Times are of the slowest rank; Gbit/s are 10^9 bits."
)


@reported
def bench(
    min_bytes: Annotated[
        str, typer.Option("--min-bytes", "-b", metavar="SIZE", help="First size, such as 64K.")
    ] = "64K",
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", "-e", metavar="SIZE", help="Last size, such as 1M or 1G.")
    ] = "64M",
    step_factor: Annotated[
        int, typer.Option("--step-factor", "-f", min=2, help="Factor between sizes.")
    ] = 4,
    iters: Annotated[
        int, typer.Option("--iters", "-n", min=1, help="Timed iterations per size.")
    ] = 10,
    ops: Annotated[
        str, typer.Option(help="all_reduce, all_gather, all_to_all, broadcast; several with commas")
    ] = "all_reduce,all_gather,all_to_all",
    group: Annotated[
        Literal["flat", "intra", "inter"],
        typer.Option(help="flat: all ranks; intra: ranks of each node; inter: one rank per node."),
    ] = "flat",
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Send --max-bytes between every pair of ranks in turn.")
    ] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="cpu: gloo; cuda: nccl.")
    ] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Timeout of a collective, seconds.")] = (
        300.0
    ),
    as_json: Json = False,
) -> None:
    """Measure how fast the ranks of torchrun exchange bytes. Rank 0 prints a table.

    Options are named as in nccl-tests, and so are sizes: K, M and G are powers of 1024.

    \b
    Ranks of this node:
      torchrun --nproc-per-node 4 --no-python lightning-dist bench
    Ranks of several nodes, the same command on each of them:
      torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d \\
        --rdzv-endpoint node0:29400 --no-python lightning-dist bench --group inter
    A slow link:
      ... lightning-dist bench --pairs --max-bytes 8M
    """
    largest = nbytes_of(max_bytes, option="--max-bytes")
    sizes = sizes_of(nbytes_of(min_bytes, option="--min-bytes"), largest, factor=step_factor)

    from lightning_dist.cli import bench_run  # torch
    from lightning_dist.profiling.links import OPS

    names = tuple(name.strip() for name in ops.split(","))
    if unknown := [name for name in names if name not in OPS]:
        raise ValueError(f"--ops must be from {', '.join(OPS)}, got {unknown[0]!r}")
    if not (pairs or sizes):
        raise ValueError(f"--min-bytes {min_bytes} must not be above --max-bytes {max_bytes}")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "No other ranks: start it with torchrun --nproc-per-node N --no-python lightning-dist "
            "bench"
        )
    is_first = os.environ["RANK"] == "0"
    settings = bench_run.BenchSettings(
        (largest,) if pairs else sizes, names, iters, group, pairs, _device(device), timeout
    )
    try:
        reports = bench_run.run(settings)
    except ValueError:
        if not is_first:  # all ranks would say the same
            raise typer.Exit(BAD_INPUT) from None
        raise
    if not is_first:
        return
    if as_json:
        print_json(groups=[report.as_dict() for report in reports])
        return
    for report in reports:
        print_report(report)


def nbytes_of(text: str, *, option: str) -> int:
    """``"1M"`` in bytes, as nccl-tests reads it: K, M and G are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    nbytes = int(float(match[1]) * 1024 ** " KMG".index(match[2] or " ")) if match else 0
    if nbytes < 1:
        raise ValueError(f"{option} must be bytes, or like 64K, 1M, 2G (of 1024), got {text!r}")
    return nbytes


def sizes_of(first: int, last: int, *, factor: int) -> tuple[int, ...]:
    """Bytes of every size: ``first`` times powers of ``factor``, up to ``last``."""
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= factor
    return tuple(sizes)


def _device(wish: str) -> str:
    import torch

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish == "cuda" and gpus < ranks:
        raise ValueError(f"--device cuda needs a GPU for each of {ranks} ranks here, it has {gpus}")
    return ("cuda" if gpus >= ranks else "cpu") if wish == "auto" else wish


def print_report(report: BenchReport) -> None:
    """Print a heading and a table."""
    nodes = list(dict.fromkeys(report.nodes[rank] for rank in report.ranks))
    names = ", ".join(nodes) if len(nodes) <= 8 else f"{', '.join(nodes[:8])}, ..."
    ranks = f"{len(report.ranks)} ranks ({report.scope}) on {names}"
    print_lines(f"{ranks}; {report.backend}, {report.device}")
    if report.pair_gbps is not None:
        _print_pairs(report, report.pair_gbps)
        return
    best = max(row.busbw_gbps for row in report.rows)
    rows = [
        (
            *(row.op, str(row.nbytes), str(row.count), "float32"),
            *(
                format_value(s * 1e3, "ms")
                for s in (row.median, min(row.seconds), max(row.seconds))
            ),
            *(format_value(rate, "Gbit/s") for rate in (row.algbw_gbps, row.busbw_gbps)),
            format_value(row.busbw_gbps / best, "%"),
        )
        for row in report.rows
    ]
    figures = ("median", "min", "max", "algbw", "busbw", "% of best")
    columns = ("op", "size (B)", "count", "dtype", *figures)
    print_table(
        columns,
        rows,
        right=("size (B)", "count", *figures),
        optional=("dtype", "count", "% of best", "max", "min"),
    )
    print_lines(LEGEND)


def _print_pairs(report: BenchReport, rates: Sequence[Sequence[float | None]]) -> None:
    names = [f"{rank} {report.nodes[rank]}" for rank in report.ranks]
    rows = [
        (name, *("-" if rate is None else f"{rate:.3f}" for rate in row))
        for name, row in zip(names, rates, strict=True)
    ]
    print_table(("Gbit/s from \\ to", *names), rows, right=names, optional=names[::-1])
    of_pairs = [
        (rate, source, target)
        for source, row in zip(report.ranks, rates, strict=True)
        for target, rate in zip(report.ranks, row, strict=True)
        if rate is not None
    ]
    (slowest, source, target), (fastest, *_) = min(of_pairs), max(of_pairs)
    print_lines(
        f"slowest: rank {source} on {report.nodes[source]} to rank {target} on "
        f"{report.nodes[target]}, {format_value(slowest, 'Gbit/s')}, "
        f"{format_value(slowest / fastest, '%')} of the fastest; "
        f"{decimal(report.pair_nbytes or 0)} each, one pair at a time"
    )
