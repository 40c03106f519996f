"""Cleaning up after a writer that was killed."""

from __future__ import annotations

import os

from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.local import LocalStorage, cut_off
from lightning_dist.checkpoint.disk.verify import verify


def recover(storage: LocalStorage, folder: str) -> None:
    """Finish or undo what a killed writer left in ``folder``; touches nothing with another name."""
    for path, target in cut_off(storage, folder).items():
        if _is_whole(path):
            storage.publish(path, target)
    for path in storage.leftovers(folder):
        name, kind = os.path.basename(path)[1:].rsplit(".", 1)
        target = os.path.join(folder, name)
        staged = kind.startswith("tmp-") and os.path.isdir(path) and not os.path.lexists(target)
        if staged and _is_whole(path):
            storage.publish(path, target)
        else:
            storage.remove(path)


def _is_whole(path: str) -> bool:
    """Whether ``path`` was cut off just before it took its name."""
    try:
        return verify(path).origin is not None
    except (CheckpointError, OSError):
        return False
