"""Checkpoints that are whole, and older ones of a folder that may go."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from lightning_dist.checkpoint.disk.format import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.scan import Description, Found, is_original, verify
from lightning_dist.checkpoint.disk.storage import LocalStorage, storage_of
from lightning_dist.cli.errors import line_of

PROTECTED = ("last", "latest", "best")
"""Checkpoints with such a name, and those they point to, are never removed."""


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
    """``problem`` without the path, for where that is printed already."""
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
    """Keep the ``keep`` newest whole checkpoints, and remove older ones.

    Names of one save (links, copies) are one checkpoint, and only the name under which a run saved
    it is removed. Damaged ones among the newest and foreign ones are not touched.

    Args:
        found: as :func:`~lightning_dist.checkpoint.disk.scan.checkpoints` gives it.
    """
    result, enough = Plan(), 0
    copies = {each.path: why for each in found if (why := _copy_of(each))}
    for paths in _saves(found):
        if enough >= keep:
            if any(_is_protected(path) or _is_link(path) for path in paths):
                result.kept += [(path, "protected name, or linked to one") for path in paths]
            else:
                result.removed += [(path, "older") for path in paths if path not in copies]
                result.untouched += [(path, copies[path]) for path in paths if path in copies]
            continue
        problems = {path: check(path).problem for path in paths}
        whole = not all(problems.values())
        enough += whole and not all(_is_protected(path) or path in copies for path in paths)
        for path, problem in problems.items():
            (result.untouched if problem else result.kept).append((path, problem))
    for each in found:
        if each.description is None:
            result.untouched.append((each.path, without_path(each.problem, each.path)))
        elif each.description.origin is None:
            result.untouched.append((each.path, "not written by lightning_dist"))
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
