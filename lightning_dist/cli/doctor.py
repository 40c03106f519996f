"""``lightning-dist doctor``: what is wrong here for distributed training, and what helps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_dist.cli.doctor_clocks import clocks
from lightning_dist.cli.doctor_finding import Finding
from lightning_dist.cli.doctor_launcher import launcher
from lightning_dist.cli.doctor_limits import limits
from lightning_dist.cli.doctor_machine import machine
from lightning_dist.cli.doctor_network import network
from lightning_dist.cli.doctor_run import two_ranks
from lightning_dist.cli.doctor_versions import devices, versions
from lightning_dist.cli.errors import reported
from lightning_dist.console import stdout_console

WRONG = 1
_COLORS = {"ok": "green", "warning": "yellow", "error": "red", "n/a": "dim"}


@reported
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    folder: Annotated[Path, typer.Option(help="Where results will be written.")] = Path(),
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Start two ranks and let them meet.")
    ] = True,
) -> None:
    """Look for what is wrong here for distributed training, and say how to put it right.

    Run it on every host, with the variables of the training: under torchrun, or in the script of
    the job. Exit code 0: nothing is wrong; 1: warnings or errors were found.

    \b
      lightning-dist doctor
      srun --nodes 4 --ntasks-per-node 1 lightning-dist doctor --json
    """
    if not folder.is_dir():
        raise ValueError(f"--folder must be a folder, and {folder} is none")
    raise typer.Exit(show(list(_findings(folder, run=run)), as_json=as_json))


def show(found: Sequence[Finding], *, as_json: bool) -> int:
    """Print what was found. The exit code."""
    wrong = [each for each in found if each.state in ("warning", "error")]
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(each) for each in found]}, indent=2))
    else:
        _print(found, wrong)
    return WRONG if wrong else 0


def _findings(folder: Path, *, run: bool) -> Iterator[Finding]:
    yield from versions()
    yield from devices()
    yield from launcher(os.environ)
    yield from network(os.environ)
    yield from clocks()
    yield from limits()
    yield from machine(os.environ, folder)
    if run:
        with Console(stderr=True).status("starting two ranks"):
            yield two_ranks(os.environ)
    else:
        yield Finding("2 ranks here", "n/a", "left out by --no-run")


def _print(found: Sequence[Finding], wrong: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("state", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for each in found:
        table.add_row(Text(each.state, _COLORS[each.state]), Text(each.name), Text(each.what))
    stdout_console().print(table)
    typer.echo()
    if not wrong:
        typer.echo("nothing is wrong")
        return
    errors = sum(each.state == "error" for each in wrong)
    typer.echo(f"errors: {errors}, warnings: {len(wrong) - errors}; what helps:")
    for each in wrong:  # outside of the table, where no line is folded
        typer.echo(f"  # {each.name}")
        typer.echo(f"  {each.fix}")
