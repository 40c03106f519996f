"""The checkpoints of a folder, and the newest complete one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lightning_dist.base.log import get_logger
from lightning_dist.checkpoint.disk.errors import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.manifest import NAME
from lightning_dist.checkpoint.disk.storage import Storage, storage_of
from lightning_dist.checkpoint.disk.storage.local import LocalStorage, cut_off
from lightning_dist.checkpoint.disk.verify import Description, describe, verify

log = get_logger(__name__)

SUFFIX = ".ckpt"


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder, or what looks like one.

    Exactly one of ``description`` and ``problem`` is set.
    """

    path: str
    description: Description | None
    problem: str = ""


def checkpoints(folder: str, *, suffix: str = SUFFIX) -> list[Found]:
    """Everything in ``folder`` that is a checkpoint or should be one, the newest first.

    Files and folders whose name ends in ``suffix``, and folders with a manifest. The newest is the
    one with the greatest :attr:`.Origin.order`. Damaged ones come last, foreign ones are sorted in
    by nothing but their name, before those.
    """
    storage, inside = storage_of(folder)
    base = folder.rstrip("/")
    if "://" in folder and "://" not in base:  # the root of a store
        base += "//"
    found = []
    for name in storage.names(inside):
        path = f"{base}/{name}"
        if not name.startswith(".") and is_checkpoint(storage, f"{inside}/{name}", suffix=suffix):
            found.append(_describe(path))
    if isinstance(storage, LocalStorage):
        found += [_describe(path) for path in cut_off(storage, inside)]
    return sorted(found, key=_age)


class Orders:
    """Numbers for :attr:`.Origin.order`: they grow with time, also where the clock goes back."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def begin_after(self, folder: str) -> None:
        """Be greater than the checkpoints of ``folder``, which a host with another clock wrote."""
        found = (each.description.origin for each in checkpoints(folder) if each.description)
        newest = max((origin.order for origin in found if origin is not None), default=0)
        self._offset = max(self._offset, newest + 1 - time.monotonic_ns())

    def next(self) -> int:
        return self._offset + time.monotonic_ns()


def saved_by(run: str, folder: str, *, resumed: str | None) -> list[Description]:
    """Checkpoints in ``folder`` that ``run`` saved under the names they have: it may remove these.

    Copies, links and checkpoints of other runs are not among them.

    Args:
        resumed: the one that training goes on from. What is newer was passed over, so it comes
            first; the rest follows, the oldest first.
    """
    found = [each.description for each in reversed(checkpoints(folder)) if each.description]
    own = [each for each in found if each.origin and each.origin.run == run and is_original(each)]
    paths = [each.path for each in own]
    after = paths.index(resumed) + 1 if resumed in paths else len(own)
    return own[after:] + own[:after]


def is_original(description: Description) -> bool:
    """Whether a checkpoint has the name under which it was saved, so that it may be removed."""
    origin, name = description.origin, description.path.rstrip("/").rsplit("/", 1)[-1]
    return origin is not None and origin.name == name


def newest_valid(folder: str, *, check: bool = True, suffix: str = SUFFIX) -> Description | None:
    """The newest checkpoint of ours in ``folder`` to go on from, with all bytes as written.

    Damaged ones are named in a warning and passed over. Weights alone do not count.

    Args:
        check: read everything and compare; otherwise headers have to do.
        suffix: of the names of checkpoints.

    Raises:
        CheckpointError: there are some, and none is whole.
    """
    while True:
        names = _names(folder)
        try:
            found, problems = _newest(folder, check=check, suffix=suffix)
        except FileNotFoundError:  # removed since it was listed, for something newer is there
            continue
        if found is not None or _names(folder) == names:  # no writer has replaced them meanwhile
            break
    for problem in problems:
        log.warning("Skipping a checkpoint: %s", problem)
    if found is None and problems:
        raise CheckpointError(
            f"None of the checkpoints in {folder} is complete: {'; '.join(problems)}. Give the "
            "path of another one, or remove these to start afresh"
        )
    return found


def _newest(folder: str, *, check: bool, suffix: str) -> tuple[Description | None, list[str]]:
    """Result of :func:`newest_valid` for the checkpoints of now, and what it skips."""
    everything = checkpoints(folder, suffix=suffix)
    # Those of unknown age may have been the newest.
    problems = [found.problem for found in everything if found.description is None]
    for found in everything:
        description = found.description
        if description is None or description.origin is None or not description.origin.resumable:
            continue
        try:
            return verify(found.path) if check else description, problems
        except FileNotFoundError:
            raise
        except (CorruptCheckpointError, OSError) as error:
            problems.append(str(error))
    return None, problems


def _names(folder: str) -> list[str]:
    storage, inside = storage_of(folder)
    return [name for name in storage.names(inside) if not name.startswith(".")]


def is_checkpoint(storage: Storage, path: str, *, suffix: str = SUFFIX) -> bool:
    """Whether it is called one, or has a manifest; it may be damaged."""
    return path.endswith(suffix) or storage.exists(f"{path}/{NAME}")


def _describe(path: str) -> Found:
    try:
        return Found(path, describe(path))
    except (CheckpointError, OSError) as error:
        return Found(path, None, str(error))


def _age(found: Found) -> tuple[int, int, int, int, str]:
    if found.description is None:
        return 2, 0, 0, 0, found.path
    if found.description.origin is None:
        return 1, 0, 0, 0, found.path
    origin = found.description.origin
    return 0, -origin.order, -origin.step, -origin.created_ns, found.path
