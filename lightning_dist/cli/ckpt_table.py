"""What the commands print of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lightning_dist.checkpoint.disk.scan import Found
from lightning_dist.checkpoint.disk.verify import Description
from lightning_dist.cli.ckpt_check import Verdict, without_path
from lightning_dist.console import stdout_console

_UNREAD = "not verified"
"""Of what has whole headers, while nobody has read the rest."""


def name_of(path: str) -> str:
    """The last part of a path or URL."""
    return path.rstrip("/").rsplit("/", 1)[-1]


def print_table(found: Sequence[Found]) -> None:
    """One row for every checkpoint."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", overflow="fold")
    for column in ("step", "created", "size", "kind", "ranks"):
        table.add_column(column, justify="right" if column in ("step", "size", "ranks") else "left")
    table.add_column("status", overflow="fold")
    for each in found:
        table.add_row(*(Text(cell) for cell in _cells(each)))
    stdout_console().print(table)


def _cells(found: Found) -> tuple[str, ...]:
    name, description = name_of(found.path), found.description
    if description is None:
        return name, "", "", "", "", "", without_path(found.problem, found.path)
    size, origin = decimal(description.nbytes), description.origin
    if origin is None:
        return name, "", "", size, description.kind, "", _UNREAD
    created = f"{_local(origin.created_ns):%Y-%m-%d %H:%M:%S}"
    return name, str(origin.step), created, size, description.kind, str(origin.ranks), _UNREAD


def fields(found: Found | Verdict) -> dict[str, Any]:
    """The same for programs."""
    description = found.description
    origin = None if description is None else description.origin
    return {
        "name": name_of(found.path),
        "path": found.path,
        "kind": description and description.kind,
        "nbytes": description and description.nbytes,
        "step": origin and origin.step,
        "created": origin and _local(origin.created_ns).isoformat(),
        "ranks": origin and origin.ranks,
        "problem": without_path(found.problem, found.path) or None,
        "verified": isinstance(found, Verdict) and (found.damaged or not found.problem),
    }


def summary(description: Description) -> str:
    """What a checkpoint is, in a few words."""
    parts = [description.kind, decimal(description.nbytes)]
    if description.origin is not None:
        parts.insert(0, f"step {description.origin.step}")
    return ", ".join(parts)


def _local(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9).astimezone()
