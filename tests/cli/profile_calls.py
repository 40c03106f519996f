"""``lightning-dist profile``, called in this process, and folders for it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from lightning_dist.cli import app
from lightning_dist.profiling.folder import RankFile, Run


def profile(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, ["profile", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result
