"""Folders that are checkpoints, or are in the way of one."""

from __future__ import annotations

import logging
import os
import re

from lightning_dist.checkpoint.disk.errors import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.manifest import NAME
from lightning_dist.checkpoint.disk.scan import checkpoints, is_original
from lightning_dist.checkpoint.disk.verify import Description, describe, verify

log = logging.getLogger(__name__)

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def local(path: str | os.PathLike[str]) -> str:
    """An absolute path. Raises ValueError for a URL."""
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(
            f"AsyncStateCheckpointer saves to a local or mounted folder, got {text!r}; save to one "
            "and copy the finished folder, which is complete as soon as it has its name"
        )
    return os.path.abspath(os.path.expanduser(text))


def numbered(folder: str, number: int) -> str:
    """Where accelerate's automatic naming puts a checkpoint."""
    return os.path.join(folder, f"checkpoint_{number}")


def number_of(path: str) -> int | None:
    """``n`` of ``checkpoint_n``."""
    match = _NUMBERED.fullmatch(os.path.basename(path))
    return None if match is None else int(match[1])


def numbers(folder: str) -> set[int]:
    """Every ``n`` for which there is something named ``checkpoint_n``."""
    return {number for name in os.listdir(folder) if (number := number_of(name)) is not None}


def own_numbers(folder: str) -> set[int]:
    """Every ``n`` of a ``checkpoint_n`` of ours: no copies, nor accelerate's."""
    found = (each.description for each in checkpoints(folder))
    numbers = (number_of(each.path) for each in found if each is not None and is_original(each))
    return {number for number in numbers if number is not None}


def require_ours(target: str) -> None:
    """Raise ValueError if something is at ``target`` that a save must not replace."""
    if not os.path.lexists(target):
        return
    if os.path.exists(os.path.join(target, NAME)):
        _require_original(target)
        return
    if not os.path.isdir(target):
        raise ValueError(f"a checkpoint is a folder, and {target} is a file; choose another name")
    if os.listdir(target):
        raise ValueError(
            f"{target} holds files and no {NAME}, so AsyncStateCheckpointer did not write it and "
            "will not replace it; remove it, or choose another name"
        )


def _require_original(target: str) -> None:
    try:
        found = describe(target)
    except CheckpointError:
        return  # damaged, and about to be replaced by a whole one
    if found.origin is not None and not is_original(found):
        raise ValueError(
            f"{target} was saved as {found.origin.name!r}, so it is a copy that "
            "AsyncStateCheckpointer did not make and will not replace; remove it, or choose "
            "another name"
        )


def newest(folder: str, *, check: bool) -> Description:
    """The newest complete checkpoint of ours in ``folder``; others are named in warnings.

    Raises:
        FileNotFoundError: there is none, not even a damaged one.
        CheckpointError: all are damaged or incomplete.
    """
    passed: dict[str, str] = {}
    chosen = None
    for found in checkpoints(folder):
        if found.description is None:
            passed[found.path] = found.problem
        elif found.description.kind == "folder" and chosen is None:
            try:
                chosen = verify(found.path) if check else found.description
            except (CheckpointError, OSError) as error:
                passed[found.path] = getattr(error, "reason", str(error))
    number_chosen = -1 if chosen is None else number_of(chosen.path) or -1
    for number in sorted(numbers(folder), reverse=True):
        path = numbered(folder, number)
        if number > number_chosen and not os.path.exists(os.path.join(path, NAME)):
            passed[path] = (
                f"it has no {NAME}: accelerate itself wrote it, whole or not; if it is whole, "
                "give it by name"
            )
    for path, reason in passed.items():
        log.warning("passing over %s: %s", path, reason)
    if chosen is not None:
        return chosen
    if passed:
        reasons = "; ".join(f"{os.path.basename(path)}: {why}" for path, why in passed.items())
        raise CheckpointError(f"there is no complete checkpoint in {folder}: {reasons}")
    raise FileNotFoundError(f"there is no checkpoint in {folder}")


def given(path: str, *, check: bool) -> Description | None:
    """What the folder at ``path`` is; None if accelerate itself wrote it.

    Raises:
        FileNotFoundError: there is no such folder.
        CorruptCheckpointError: it is incomplete or has changed.
        ValueError: it holds something else.
    """
    if not os.path.isdir(path):
        raise FileNotFoundError(f"there is no folder {path}")
    if not os.path.exists(os.path.join(path, NAME)):
        if not os.listdir(path):
            raise CorruptCheckpointError(path, "the folder is empty")
        log.warning(
            "%s has no %s: accelerate itself wrote it, and nobody can tell whether it is complete "
            "and as it was written",
            path,
            NAME,
        )
        return None
    description = verify(path) if check else describe(path)
    if description.kind != "folder":
        raise ValueError(
            f"{path} is a {description.kind} checkpoint of Lightning, not one of accelerate"
        )
    return description
