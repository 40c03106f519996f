"""``lightning-dist ckpt``, called in this process."""

from __future__ import annotations

import json
from pathlib import Path

from calls import program
from cli_saves import save_file
from click.testing import Result

LEFTOVER = ".epoch=9.ckpt.tmp-0123456789abcdef"


def ckpt(*arguments: str | Path, stdin: str = "") -> Result:
    result = program("ckpt", *arguments, input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refusal(*arguments: str | Path, code: int = 2) -> str:
    """The one line on stderr of a command that must fail."""
    result = ckpt(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    return line.removeprefix("lightning-dist: ")


def listed(folder: str | Path) -> dict[str, dict[str, object]]:
    return {each["name"]: each for each in content(folder)["checkpoints"]}


def content(folder: str | Path) -> dict[str, list[dict[str, object]]]:
    result = ckpt("ls", folder, "--json")
    assert result.exit_code == 0
    return dict(json.loads(result.stdout))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lightning_dist.lock"}


def steps(folder: Path, *wanted: int) -> None:
    """One file for each of these steps."""
    for step in wanted:
        save_file(folder / f"{step}.ckpt", step=step)
