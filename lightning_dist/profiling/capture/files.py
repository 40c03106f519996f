"""Files of a profile: its folder, and the lines of a rank."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
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
    """Lines of one rank, in the order of its records.

    A disk that fails does not stop the training: nothing more is written then, because the last
    line may be incomplete.

    Args:
        folder: of the run; None: nothing is kept.
        appends: go on with the file that is there; False: replace it.
        on_problem: called with what went wrong, and what that costs.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        rank: int,
        appends: bool = False,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self._path = Path(folder or "") / f"rank{rank}.jsonl"
        self._on_problem = on_problem
        self._lines: list[bytes] = []
        self._file: BufferedWriter | None = None
        if folder is not None:
            with self._recording_loss("steps of this rank are not saved"):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                if appends and _is_torn(self._path):
                    self._lines.append(b"")
                self._file = self._path.open("ab" if appends else "wb")

    def write(self, records: Iterable[Record]) -> None:
        """Append them, with the next flush."""
        if self._file is not None:
            self._lines += map(to_line, records)

    def flush(self) -> None:
        """Have all of them in the file."""
        lines, self._lines = self._lines, []
        if self._file is not None:
            with self._recording_loss("further steps of this rank are not saved"):
                self._file.write(b"".join(each + b"\n" for each in lines))
                self._file.flush()

    def close(self) -> None:
        """Make what was written durable."""
        self.flush()
        file, self._file = self._file, None
        if file is not None:
            with self._recording_loss("it may be incomplete"), file:
                os.fsync(file.fileno())

    @contextmanager
    def _recording_loss(self, loss: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError):
                    file.close()
            self._on_problem(f"{error.filename or self._path}: {error.strerror}; {loss}")


def _is_torn(path: Path) -> bool:
    """Whether who has written a file has died within a line."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 1, 0))
            return file.read() not in (b"\n", b"")
    except FileNotFoundError:
        return False


def await_ends(folder: Path, ranks: Iterable[int], *, timeout: float) -> bool:
    """Wait until all of ``ranks`` have written how they ended, for ``timeout`` seconds at most.

    Ranks that fail together end within a moment of each other.
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
