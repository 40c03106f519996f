"""How the files of a report are written."""

from __future__ import annotations

import os
from pathlib import Path


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
