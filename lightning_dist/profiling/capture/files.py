"""Files of a profile: its folder, the lines of a rank, and files that are replaced as a whole."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from lightning_dist.profiling.capture.events import EndRecord, Record, from_line, to_line

_TAIL = 4096
"""Bytes; the last line is a short one."""


def new_run_folder(parent: Path, *, on_problem: Callable[[str], None]) -> Path:
    """The first ``run-<n>`` that is not there yet, or a temporary one."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in count():
            folder = parent / f"run-{number}"
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="comm_profile-"))
        on_problem(f"{error.filename}: {error.strerror}; the profile is in {folder}")
        return folder
    raise AssertionError("there are numbers enough")


class RankFile:
    """Appends the records of one rank. Whole lines reach the file when they are written.

    Writing raises ``OSError`` where not all of it reaches the file. Nothing may follow then,
    because the last line may be incomplete.

    What an older run has left under its name goes: only rank 0 sees whether the number of a run is
    taken, and only on its own disk.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path, *, rank: int) -> None:
        self.path = Path(folder) / f"rank{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("wb")

    def write(self, records: Sequence[Record]) -> None:
        """Append them."""
        self.write_lines([to_line(each) for each in records])

    def write_lines(self, lines: Sequence[bytes]) -> None:
        """The same of what :func:`to_line` has made of them."""
        self.file.write(b"".join(each + b"\n" for each in lines))
        self.file.flush()

    def close(self) -> None:
        """Make what was written durable."""
        with self.file:
            os.fsync(self.file.fileno())


def await_ends(folder: Path, ranks: Iterable[int], *, timeout: float) -> bool:
    """Wait until all of ``ranks`` have written how they ended, for ``timeout`` seconds at most.

    Ranks that fail together end within a moment of each other, and their last lines are in no file
    before that.
    """
    missing, until = set(ranks), time.monotonic() + timeout
    while missing := {rank for rank in missing if not _has_ended(folder / f"rank{rank}.jsonl")}:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _has_ended(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _TAIL, 0))
            *_, last = file.read().splitlines()
            return isinstance(from_line(last), EndRecord)
    except (OSError, ValueError):  # not there yet, empty, or half a line
        return False


def replace_file(path: str | Path, content: bytes) -> None:
    """Write a file; what was there is replaced when all of the new one is on disk.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a crash can leave the new name, and nothing under it
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
