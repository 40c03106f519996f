"""Checkpoints that are whole, and those of a folder that may go."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from lightning_dist.checkpoint.disk.archive import ROOT
from lightning_dist.checkpoint.disk.errors import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.manifest import FORMAT, NAME, RECORD
from lightning_dist.checkpoint.disk.scan import Found, is_original
from lightning_dist.checkpoint.disk.storage import LocalStorage, Storage, storage_of
from lightning_dist.checkpoint.disk.verify import Description, verify
from lightning_dist.cli.errors import line_of

PROTECTED = ("last", "latest", "best")
"""Checkpoints with such a name, and those it points to, are never removed."""
_SHARD = re.compile(r"shard-\d{5}-of-\d{5}-[0-9a-f]{16}\.bin")
_SAVED_AS = re.compile(rb'"name": ("(?:[^"\\]|\\.)*")')
_HEAD = 4096
"""Bytes in which the description of a single file is."""
_FIRST_RECORD = f"{ROOT}/{RECORD}".encode()


@dataclass(frozen=True)
class Verdict:
    """Result of reading a checkpoint: its description, or a problem.

    Args:
        damaged: the problem is in its bytes, and not that they could not be read or understood.
    """

    path: str
    description: Description | None
    problem: str = ""
    damaged: bool = False


def check(path: str) -> Verdict:
    """Read the checkpoint at ``path`` to the last byte; a terminal shows which one it is."""
    try:
        with Console(stderr=True).status(Text(f"reading {path}")):
            return Verdict(path, verify(path))
    except (CheckpointError, OSError) as error:
        damaged = isinstance(error, CorruptCheckpointError)
        return Verdict(path, None, without_path(line_of(error), path), damaged)


def without_path(problem: str, path: str) -> str:
    """``problem`` for where the path is said already."""
    return problem.removeprefix(f"{path} ").removeprefix(f"{path}: ")


@dataclass
class Plan:
    """Future of every checkpoint, as ``(path, why)``."""

    kept: list[tuple[str, str]] = field(default_factory=list)
    removed: list[tuple[str, str]] = field(default_factory=list)
    untouched: list[tuple[str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, list[dict[str, str | None]]]:
        """For JSON."""
        return {
            name: [{"path": path, "why": why or None} for path, why in items]
            for name, items in vars(self).items()
        }


def plan(found: Sequence[Found], *, keep: int, check: Callable[[str], Verdict] = check) -> Plan:
    """Keep the ``keep`` newest whole checkpoints, and remove older and damaged ones.

    Names of one save (links, copies) are one checkpoint, and only the name under which a run saved
    it is removed. Foreign ones, those of a newer version and those that cannot be read are not
    touched. Nothing is removed unless a whole one is kept.

    Args:
        found: as :func:`~lightning_dist.checkpoint.disk.scan.checkpoints` gives it.
    """
    result = Plan()
    damaged: list[tuple[str, str]] = []
    enough, any_whole = 0, False
    copies = {each.path: why for each in found if (why := _copy_of(each))}
    for paths in _saves(found):
        named = any(_is_protected(path) or _is_link(path) for path in paths)
        if enough >= keep:
            if named:
                result.kept += [(path, "protected name, or linked to one") for path in paths]
            else:
                result.removed += [(path, "older") for path in paths if path not in copies]
                result.untouched += [(path, copies[path]) for path in paths if path in copies]
            continue
        verdicts = {path: check(path) for path in paths}
        whole = any(not verdict.problem for verdict in verdicts.values())
        any_whole |= whole
        enough += whole and not all(_is_protected(path) or path in copies for path in paths)
        for path, verdict in verdicts.items():
            if not verdict.problem:
                result.kept.append((path, ""))
            elif named or path in copies or not verdict.damaged:
                result.untouched.append((path, verdict.problem))
            else:
                damaged.append((path, verdict.problem))
    pointed_to = {_real(each.path) for each in found if _is_protected(each.path)}
    for each in found:
        if each.description is None:
            verdict = check(each.path)
            if (
                not verdict.damaged
                or _real(each.path) in pointed_to
                or not is_ours(*storage_of(each.path))
            ):
                result.untouched.append((each.path, verdict.problem or "it has just changed"))
            else:
                damaged.append((each.path, verdict.problem))
        elif each.description.origin is None:
            result.untouched.append((each.path, "not written by lightning_dist"))
    for path, problem in damaged:
        if not any_whole:
            result.untouched.append((path, f"{problem}; no complete copy is left"))
        elif not _has_locks(path):
            result.untouched.append((path, f"{problem}; or a save is under way (unknown)"))
        else:
            result.removed.append((path, problem))
    return result


def _saves(found: Sequence[Found]) -> list[list[str]]:
    """Paths of checkpoints of ours, by save, the newest first."""
    saves: dict[str, list[str]] = {}
    for each in found:
        if each.description is not None and each.description.origin is not None:
            saves.setdefault(each.description.origin.save_id, []).append(each.path)
    return list(saves.values())


def _copy_of(found: Found) -> str:
    """Reason why no run has written ``found`` under this name; empty: one has, or nobody knows."""
    description = found.description
    if description is None or description.origin is None or is_original(description):
        return ""
    return f"saved as {description.origin.name!r}; this is a copy or a link"


def _is_link(path: str) -> bool:
    storage, inside = storage_of(path)
    return isinstance(storage, LocalStorage) and os.path.islink(inside)


def _is_protected(path: str) -> bool:
    return path.rsplit("/", 1)[-1].startswith(PROTECTED)


def _has_locks(path: str) -> bool:
    return isinstance(storage_of(path)[0], LocalStorage)


def _real(path: str) -> str:
    storage, inside = storage_of(path)
    return os.path.realpath(inside) if isinstance(storage, LocalStorage) else inside


def is_ours(storage: Storage, inside: str) -> bool:
    """True if this package wrote a damaged checkpoint under this name; in doubt False."""
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
