"""Files that other processes see: replaced as a whole, or left to find out who sees a folder.

Standard library only.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_PREFIX = "seen-"


def replace_file(path: str | Path, content: bytes) -> None:
    """Write a file; what was there is replaced when all of the new one is on disk."""
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
