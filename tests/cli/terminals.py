"""Programs on a terminal: what a user sees there."""

import os
import pty
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import readable


@dataclass(frozen=True)
class Shown:
    """What a program has left: on the terminal, and in the pipe if its standard output was one."""

    returncode: int
    terminal: str
    pipe: str


def on_terminal(
    command: Sequence[str | Path], *, piped: bool = False, limit: float = 60, **environ: str
) -> Shown:
    """Run a program whose standard error, and output unless ``piped``, is a terminal.

    limit: seconds of silence after which it is taken for hanging.
    """
    ours, theirs = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE if piped else theirs,
        stderr=theirs,
        env={**kept, "TERM": "xterm-256color", "COLUMNS": "200", **environ},
    ) as job:
        os.close(theirs)
        said = b""
        try:
            while readable(ours, limit):  # while it runs: a terminal holds little
                said += os.read(ours, 1 << 16)
            job.kill()
        except OSError:  # how the end of a terminal is read
            pass
        finally:
            os.close(ours)
        pipe = job.stdout.read().decode() if job.stdout else ""
    return Shown(job.returncode, said.decode(), pipe)
