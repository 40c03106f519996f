"""What ``lightning-dist config --show`` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from lightning_dist.configuration import OPTIONS, Resolved
from lightning_dist.console import stdout_console


def show(resolved: Resolved, *, config: Path, as_json: bool) -> None:
    """Every option with its value and where that comes from.

    Args:
        config: Accelerate's file, which may not be there.
    """
    rows: dict[str, dict[str, Any]] = {
        name: {
            "value": resolved.value(name),
            "from": resolved.origins.get(name, "default"),
        }
        for name in OPTIONS
    }
    there = str(config) if config.is_file() else None
    if as_json:
        content = {"options": rows, "files": resolved.files, "accelerate": there}
        typer.echo(json.dumps(content, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("option", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for name, row in rows.items():
        value = row["value"]
        text = value if isinstance(value, str) else json.dumps(value)
        table.add_row(Text(name), Text(text), Text(row["from"]))
    stdout_console().print(table)
    typer.echo(f"accelerate: {there or f'{config} is not there; lightning-dist config writes it'}")
