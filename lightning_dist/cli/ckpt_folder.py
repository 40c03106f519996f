"""What a folder of checkpoints holds, and what in it is ours."""

from __future__ import annotations

import json
import re

from lightning_dist.checkpoint.disk.archive import ROOT
from lightning_dist.checkpoint.disk.manifest import FORMAT, NAME, RECORD
from lightning_dist.checkpoint.disk.scan import checkpoints, is_checkpoint
from lightning_dist.checkpoint.disk.storage import Storage, storage_of

_SHARD = re.compile(r"shard-\d{5}-of-\d{5}-[0-9a-f]{16}\.bin")
_SAVED_AS = re.compile(rb'"name": ("(?:[^"\\]|\\.)*")')
_HEAD = 4096
"""Bytes in which the description of a single file is."""
_FIRST_RECORD = f"{ROOT}/{RECORD}".encode()


def require_folder(folder: str) -> tuple[Storage, str]:
    """The storage of a folder of checkpoints, and the path within it.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is something else.
    """
    storage, inside = storage_of(folder)
    if not storage.exists(inside):
        raise FileNotFoundError(f"there is no folder {folder}")
    if not storage.is_folder(inside):
        raise ValueError(f"{folder} is a file, not a folder of checkpoints")
    if storage.exists(f"{inside}/{NAME}"):
        raise ValueError(f"{folder} is one checkpoint, not a folder of checkpoints")
    return storage, inside


def checkpoints_at(path: str) -> list[str]:
    """``path`` if it is a checkpoint or should be one, else the paths of those in this folder.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is a folder without any.
    """
    storage, inside = storage_of(path)
    if not storage.exists(inside):
        raise FileNotFoundError(f"there is no checkpoint or folder at {path}")
    is_one = is_checkpoint(storage, inside) or not storage.is_folder(inside)
    if is_one or is_ours(storage, inside):
        return [path]
    found = [each.path for each in checkpoints(path)]
    if not found:
        raise ValueError(f"there are no checkpoints in {path}")
    return found


def is_ours(storage: Storage, inside: str) -> bool:
    """Whether this package wrote what is left of a damaged checkpoint, under the name that it has;
    in doubt it did not."""
    if storage.is_folder(inside):
        names = storage.names(inside)
        text = storage.read(f"{inside}/{NAME}") if NAME in names else b""
        known = FORMAT.encode() in text or any(map(_SHARD.fullmatch, names))
    else:
        with storage.open(inside) as file:  # the description is the first record
            text = bytes(file.read(_HEAD))
        known = text[30 : 30 + len(_FIRST_RECORD)] == _FIRST_RECORD
    saved_as = _SAVED_AS.search(text)
    if not known or saved_as is None:
        return known
    try:
        return bool(json.loads(saved_as[1]) == inside.rsplit("/", 1)[-1])
    except ValueError:
        return False
