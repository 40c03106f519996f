"""Whether several hosts see one folder: one process leaves a file there, the others look for it.

Standard library only; how the name of the file gets to the others is the caller's.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_PREFIX = "seen-"


def leave_token(folder: Path) -> str:
    """A file for others to look for; its name, or nothing if it cannot be written.

    The name has never been there before, so that no cache of a network filesystem knows it.
    """
    name = f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{_PREFIX}*"):
            old.unlink(missing_ok=True)
        (folder / name).touch()
    except OSError:
        return ""
    return name


def has_token(folder: Path, name: str) -> bool:
    """Whether this process sees the file that another has left."""
    return (folder / name).exists()


def remove_token(folder: Path, name: str) -> None:
    """Nobody looks for it any more."""
    with suppress(OSError):
        (folder / name).unlink(missing_ok=True)
