"""``lightning-dist profile``, called in this process, and folders for it."""

from __future__ import annotations

from pathlib import Path

from calls import program
from click.testing import Result

from lightning_dist.profiling.capture.files import RankFile
from lightning_dist.profiling.run import Run


def profile(*arguments: str | Path) -> Result:
    result = program("profile", *arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refusal(*arguments: str | Path) -> str:
    """The one line on stderr of a command that must fail."""
    result = profile(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return line.removeprefix("lightning-dist: ")


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
