"""Whether ranks have written down how they ended."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from lightning_dist.profiling.capture.lines import from_line
from lightning_dist.profiling.capture.records import EndRecord

_TAIL = 4096
"""Bytes; the last line is a short one."""


def await_ends(folder: Path, ranks: Iterable[int], *, patience: float) -> bool:
    """Wait until all of ``ranks`` have, at most ``patience`` seconds; whether they have.

    Ranks that fail together end within a moment of each other, and their last lines are in no file
    before that.
    """
    missing, until = set(ranks), time.monotonic() + patience
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
            *_, last = file.read().decode(errors="replace").splitlines()
            return isinstance(from_line(last), EndRecord)
    except (OSError, ValueError):  # not there yet, empty, or half a line
        return False
