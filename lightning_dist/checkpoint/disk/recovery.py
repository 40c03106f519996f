"""Cleaning up after a writer that was killed."""

from __future__ import annotations

import os

from lightning_dist.base.log import get_logger
from lightning_dist.checkpoint.disk.errors import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.storage import Storage
from lightning_dist.checkpoint.disk.storage.local import LocalStorage, leftovers_by_name
from lightning_dist.checkpoint.disk.verify import verify

log = get_logger(__name__)


def recover(storage: Storage, folder: str) -> None:
    """Finish or undo what a killed writer left in ``folder``; touches nothing with another name.

    Nothing is removed before its name shows a checkpoint again, and nothing of a name for which a
    staged checkpoint cannot be read: it may be the newest one. In an object store uploads that
    nobody can be at work on any more are removed.
    """
    if not isinstance(storage, LocalStorage):
        for path in storage.leftovers(folder):
            storage.remove(path)
        return
    for name, left in leftovers_by_name(storage, folder).items():
        target = os.path.join(folder, name)
        for paths in left.values():  # several are left only where some could not be read
            paths.sort(key=lambda path: os.lstat(path).st_mtime_ns, reverse=True)
        if not os.path.lexists(target):
            try:
                whole = _whole(storage, left["tmp"], files=bool(left["old"]))
            except (CheckpointError, OSError) as error:
                log.warning("%s; it is unchanged, and checked again at the next start", error)
                continue
            if whole or left["old"]:
                storage.publish(whole or left["old"][0], target)
        for path in (*left["tmp"], *left["old"], *left["trash"]):
            if os.path.lexists(path):
                storage.remove(path)


def _whole(storage: LocalStorage, staged: list[str], *, files: bool) -> str | None:
    """The one that was cut off just before it took its name, if any.

    Args:
        files: whether a file may be it; one that replaces nothing is published in one call.

    Raises:
        CheckpointError: a newer version of this package wrote one of them.
        OSError: one cannot be read.
    """
    for path in staged:
        try:
            if files or os.path.isdir(path):
                found = verify(path, find_storage=lambda path: (storage, path))
                if found.origin is not None:
                    return path
        except (CorruptCheckpointError, FileNotFoundError):
            continue
        except OSError as error:
            raise OSError(f"could not read {path} ({error})") from error
    return None
