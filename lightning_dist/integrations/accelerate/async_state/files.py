"""Which files of which rank a folder of accelerate holds.

The lowest rank that writes a file has accelerate's name for it. Where another rank writes one with
the same name, it is that rank's own state: ``custom_checkpoint_0.pkl`` of rank 1 is kept as
``custom_checkpoint_0.rank1.pkl``. Accelerate by itself does not read those.

``accelerator.load_state`` reads optimizers, schedulers and loaders with the restricted unpickler,
but registered objects without it: those are read with it here first, which runs no code of theirs.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_dist.checkpoint.restricted import problem_with
from lightning_dist.integrations.accelerate.private import load_restricted


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


_CUSTOM = re.compile(r"custom_checkpoint_\d+\.pkl")
_PICKLED = re.compile(r"(custom_checkpoint_|optimizer|scheduler|dl_state_dict).*\.(pkl|bin)")


def problem_on_load(folder: str, *, rank: int) -> ValueError | None:
    """Why registered objects of ``rank`` are not loaded from ``folder``; None if they may be."""
    names = set(os.listdir(folder))
    for name in sorted(filter(_CUSTOM.fullmatch, names)):
        own = named_for(rank, name)
        if problem := _problem_with(folder, own if own in names else name):
            return problem
    return None


def problem_on_save(folder: str) -> ValueError | None:
    """Why what was written to ``folder`` could not be loaded; None if it could be."""
    for name in sorted(filter(_PICKLED.fullmatch, os.listdir(folder))):
        if problem := _problem_with(folder, name):
            return problem
    return None


def _problem_with(folder: str, name: str) -> ValueError | None:
    path = os.path.join(folder, name)
    with open(path, "rb") as file:
        return problem_with(
            file, path=path, load=load_restricted
        )  # Accelerate's allows arrays of NumPy
