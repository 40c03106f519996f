"""The program, called in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from click.testing import CliRunner, Result

from lightning_dist.cli import app

PROGRAM = typer.main.get_command(app)  # made once: it takes longer than most commands do


def program(*words: str | Path, **options: Any) -> Result:
    """What ``lightning-dist`` with these words has printed, and its exit code."""
    return CliRunner().invoke(PROGRAM, [*map(str, words)], **options)
