"""Which files of which rank a folder of accelerate holds.

The lowest rank that writes a file has accelerate's name for it. Where another rank writes one with
the same name, it is that rank's own state: ``custom_checkpoint_0.pkl`` of rank 1 is kept as
``custom_checkpoint_0.rank1.pkl``. Accelerate by itself does not read those.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def named_for(rank: int, name: str) -> str:
    """The name under which ``rank`` keeps its own file of a name that a lower rank has too."""
    stem, suffix = os.path.splitext(name)
    return f"{stem}.rank{rank}{suffix}"


def names_in(folder: str) -> list[str]:
    """All files in ``folder`` and its folders, relative to it."""
    found = (path for path in Path(folder).rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def share_of(rank: int, held: Sequence[Sequence[str]], *, folder: str) -> list[tuple[str, str]]:
    """What ``rank`` adds to the checkpoint: ``(name in the checkpoint, path)``.

    Args:
        held: names of all ranks' files.
        folder: this rank's files.
    """
    lower = {name for names in held[:rank] for name in names}
    return [
        (named_for(rank, name) if name in lower else name, f"{folder}/{name}")
        for name in held[rank]
    ]


@contextmanager
def as_seen_by(rank: int, folder: str) -> Iterator[str]:
    """``folder`` with this rank's own files under accelerate's names, as symbolic links."""
    names = set(names_in(folder))
    own = {name: mine for name in names if (mine := named_for(rank, name)) in names}
    if not own:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="lightning_dist-view-") as temporary:
        view = Path(temporary, Path(folder).name)
        for name in names:
            link = view / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(folder, own.get(name, name)).resolve())
        yield str(view)
