"""The command, and two ranks on this node as a proof that any work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from lightning_dist.base.console import print_table
from lightning_dist.base.versions import versions
from lightning_dist.cli.doctor import Finding
from lightning_dist.cli.doctor.network import launcher, network
from lightning_dist.cli.doctor.node import devices, features, limits, machine
from lightning_dist.cli.errors import reported

_COLORS = {"ok": "green", "warning": "yellow", "error": "red", "n/a": "dim"}
_RANK = """
import datetime, sys, torch, torch.distributed as dist
from lightning_dist.base.private import destroy_group
rank, store, seconds = sys.argv[1:]
timeout = datetime.timedelta(seconds=float(seconds))
dist.init_process_group("gloo", f"file://{store}", timeout, world_size=2, rank=int(rank))
total = torch.tensor([int(rank) + 1])
dist.all_reduce(total)
assert total.item() == 3, f"1 + 2 was {total.item()}"
destroy_group()
"""


@reported
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Start two ranks that exchange a tensor.")
    ] = True,
) -> None:
    """Diagnose this environment, and suggest fixes.

    Checks what distributed training needs. Run it on every node with the environment of the
    training: under torchrun, or in the job script. Exit code 1 if there is an error; warnings
    do not change it.

    \b
      lightning-dist doctor
      srun --nodes 4 --ntasks-per-node 1 lightning-dist doctor --json
    """
    ranks = " and starting two ranks" if run else ""
    typer.echo(f"Checking this environment{ranks}; this takes several seconds.", err=True)
    findings = {name: Finding("ok", version) for name, version in versions().items()}
    findings |= {**features(), **devices(), "launcher variables": launcher(os.environ)}
    findings |= {**network(os.environ), **limits(), **machine(os.environ)}
    if run:
        findings["2 ranks here"] = two_ranks(os.environ)
    else:
        findings["2 ranks here"] = Finding("n/a", "skipped by --no-run")
    raise typer.Exit(show(findings, as_json=as_json))


def show(findings: Mapping[str, Finding], *, as_json: bool) -> int:
    """Print the findings by the names of their checks. Exit code of the command."""
    states = [each.state for each in findings.values()]
    errors, warnings = states.count("error"), states.count("warning")
    if as_json:
        rows = [{"name": name, **asdict(each)} for name, each in findings.items()]
        typer.echo(json.dumps({"findings": rows}, indent=2))
        return int(errors > 0)
    cells = [
        (Text(each.state, _COLORS[each.state]), name, each.what) for name, each in findings.items()
    ]
    print_table(("state", "check", "result"), cells, fold=("result",))
    if not errors + warnings:
        typer.echo("\nNo problems.")
        return 0
    typer.echo(f"\nerrors: {errors}, warnings: {warnings}\nSuggested fixes:")
    for name, each in findings.items():  # outside of the table, where no line is folded
        if each.fix:
            typer.echo(f"  # {name}\n  {each.fix}")
    return int(errors > 0)


def two_ranks(environ: Mapping[str, str], *, timeout: float = 60.0) -> Finding:
    """Two processes with these variables form a gloo group and add two numbers."""
    fix = "GLOO_SOCKET_IFNAME=lo lightning-dist doctor  # does it work on loopback?"
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, str(rank), f"{folder}/store", str(timeout / 2)],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for rank in range(2)
        ]
        try:
            for rank, process in enumerate(ranks):
                remaining = max(0.0, begin + timeout - time.monotonic())
                output, _ = process.communicate(timeout=remaining)
                if process.returncode:
                    last = (output.strip() or f"exit code {process.returncode}").splitlines()[-1]
                    return Finding("error", f"rank {rank}: {last}", fix)
        except subprocess.TimeoutExpired:
            return Finding("error", f"no connection between them within {timeout:.0f} s", fix)
        finally:
            for process in ranks:
                with process:
                    process.kill()
    return Finding("ok", f"gloo works; {time.monotonic() - begin:.1f} s")
