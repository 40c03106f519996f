"""The program, called in this process, and folders for its commands."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer
from cli_saves import save_file
from click.testing import CliRunner, Result

from lightning_dist.cli import app
from lightning_dist.profiling.capture.files import RankFile
from lightning_dist.profiling.run import Run

PROGRAM = typer.main.get_command(app)  # made once: it takes longer than most commands do
LOADED = """
import sys
import typer.testing
from lightning_dist.cli import app
for command in sys.argv[1:]:
    result = typer.testing.CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
print(*sorted({name.split(".")[0] for name in sys.modules} & {"torch", "lightning", "fsspec"}))
"""
"""Prints which large packages the commands of its arguments have loaded."""
LEFTOVER = ".epoch=9.ckpt.tmp-0123456789abcdef"


def commands(command: click.Command = PROGRAM, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of every command and every group of commands."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *path, name)


def program(*words: str | Path, **options: Any) -> Result:
    """What ``lightning-dist`` with these words has printed, and its exit code."""
    return CliRunner().invoke(PROGRAM, [*map(str, words)], **options)


def called(*words: str | Path, stdin: str = "") -> Result:
    """The same of a command that raises nothing."""
    result = program(*words, input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def printed(*words: str | Path, stdin: str = "") -> str:
    """What a command prints that succeeds and complains of nothing."""
    result = called(*words, stdin=stdin)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refusal(*words: str | Path, code: int = 2) -> str:
    """The one line on stderr of a command that must fail."""
    result = called(*words)
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("lightning-dist: ")
    return line.removeprefix("lightning-dist: ")


def ckpt(*arguments: str | Path, stdin: str = "") -> Result:
    return called("ckpt", *arguments, stdin=stdin)


def listed(folder: str | Path) -> dict[str, dict[str, object]]:
    return {each["name"]: each for each in content(folder)["checkpoints"]}


def content(folder: str | Path) -> dict[str, list[dict[str, object]]]:
    return dict(json.loads(printed("ckpt", "ls", folder, "--json")))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lightning_dist.lock"}


def steps(folder: Path, *wanted: int) -> None:
    """One file for each of these steps."""
    for step in wanted:
        save_file(folder / f"{step}.ckpt", step=step)


def profile(*arguments: str | Path) -> Result:
    return called("profile", *arguments)


def save(folder: Path, run: Run) -> Path:
    """The folder that such a run has left."""
    for rank, each in run.ranks.items():
        file = RankFile(folder, rank=rank)
        end = [] if each.end is None else [each.end]
        file.write(
            [each.metadata, *each.clocks, *each.steps.values(), *each.errors, *each.links, *end]
        )
        file.close()
    return folder
