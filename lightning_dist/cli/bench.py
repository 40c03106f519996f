"""``lightning-dist bench``: how fast ranks exchange bytes, as nccl-tests tells it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lightning_dist.cli.bench_sizes import sizes_of
from lightning_dist.cli.bench_table import print_report
from lightning_dist.cli.errors import BAD_INPUT, reported

if TYPE_CHECKING:
    from lightning_dist.cli.bench_run import Report, Settings


@reported
def bench(
    sizes: Annotated[
        str, typer.Option(help="MIN:MAX in steps of 4, or a list; KB is 1000 bytes, KiB 1024.")
    ] = "64KB:64MB",
    ops: Annotated[
        str, typer.Option(help="all_reduce, all_gather, all_to_all, broadcast; several with commas")
    ] = "all_reduce,all_gather,all_to_all",
    iterations: Annotated[int, typer.Option(min=1, help="Uses of each that count.")] = 10,
    group: Annotated[
        Literal["flat", "intra", "inter"],
        typer.Option(help="All ranks; those of each host; or one of every host."),
    ] = "flat",
    pairs: Annotated[
        bool,
        typer.Option("--pairs", help="Send between each two in turn; the largest of --sizes."),
    ] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="cpu: gloo; cuda: nccl.")
    ] = "auto",
    nproc: Annotated[
        int | None, typer.Option(min=2, help="Start so many ranks on this host, without torchrun.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a collective may take.")] = (
        300.0
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Rank 0 writes the figures to a file too, as JSON."
        ),
    ] = None,
) -> None:
    """Measure how fast ranks exchange bytes. Rank 0 prints a table.

    \b
    Ranks of this host:
      lightning-dist bench --nproc 4
    Ranks of several hosts, the same command on each of them:
      torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d \\
        --rdzv-endpoint node0:29400 --no-python lightning-dist bench --group inter
    A slow link:
      ... lightning-dist bench --pairs --sizes 8MB
    """
    writes = nproc is not None or os.environ.get("RANK", "0") == "0"
    if to is not None and writes and not to.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {to.parent} for --out {to}")
    _require_ranks(nproc)

    from lightning_dist.cli import bench_run  # torch
    from lightning_dist.profiling.links import OPS

    names = tuple(name.strip() for name in ops.split(","))
    if unknown := [name for name in names if name not in OPS]:
        raise ValueError(f"--ops must be of {', '.join(OPS)}, and {unknown[0]!r} is not")
    settings = bench_run.Settings(
        sizes_of(sizes), names, iterations, group, pairs, _device(device, nproc), timeout
    )
    reports = _reports(settings, nproc)
    if reports is None:
        return
    content = json.dumps({"groups": [each.as_dict() for each in reports]}, indent=2)
    if as_json:
        typer.echo(content)
    else:
        for report in reports:
            print_report(report)
    if to is not None:
        to.write_text(content)


def _require_ranks(nproc: int | None) -> None:
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if nproc is None and not launched:
        raise ValueError("no other ranks: add --nproc N for this host, or start it with torchrun")
    if nproc is not None and launched:
        raise ValueError("--nproc starts ranks itself: leave it out under torchrun")


def _device(wish: str, nproc: int | None) -> str:
    import torch

    ranks = nproc or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish == "cuda" and gpus < ranks:
        raise ValueError(f"--device cuda needs a GPU for each of {ranks} ranks here, it has {gpus}")
    return ("cuda" if gpus >= ranks else "cpu") if wish == "auto" else wish


def _reports(settings: Settings, nproc: int | None) -> list[Report] | None:
    from lightning_dist.cli import bench_run

    if nproc is not None:
        return bench_run.run_local(settings, nproc)
    try:
        return bench_run.run_here(settings)
    except ValueError:
        if os.environ["RANK"] != "0":  # all ranks would say the same
            raise typer.Exit(BAD_INPUT) from None
        raise
