"""Checkpoints in a folder: found, verified, and cleared of what dead trainers left."""

from __future__ import annotations

import errno
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lightning_dist.base.log import get_logger
from lightning_dist.checkpoint.disk.format import (
    NAME,
    RECORD,
    ROOT,
    Archive,
    CheckpointError,
    CorruptCheckpointError,
    Manifest,
    Origin,
    crc32,
)
from lightning_dist.checkpoint.disk.storage import Storage, storage_of
from lightning_dist.checkpoint.disk.storage.base import SLICE
from lightning_dist.checkpoint.disk.storage.local import LocalStorage, cut_off, leftovers_by_name

log = get_logger(__name__)


Kind = Literal["single", "sharded", "folder", "torch.save"]


@dataclass(frozen=True)
class Description:
    """Header of a checkpoint.

    ``kind``: ``"single"`` and ``"sharded"`` as AsyncCheckpoint writes them, ``"folder"`` of
    ordinary files (AsyncStateCheckpointer), ``"torch.save"``: a file of torch.save.
    """

    path: str
    kind: Kind
    nbytes: int
    origin: Origin | None
    """None for a file of torch.save."""


FindStorage = Callable[[str], tuple[Storage, str]]


def describe(path: str, *, find_storage: FindStorage = storage_of) -> Description:
    """The description of the checkpoint at ``path``, from its headers only.

    Raises:
        FileNotFoundError: nothing is there.
        CorruptCheckpointError: it is incomplete, or no checkpoint.
        CheckpointError: a newer version of this package wrote it.
    """
    storage, inside = find_storage(path)
    if storage.is_folder(inside):
        manifest = read_manifest(path, storage, inside)
        kind: Kind = "sharded" if manifest.records else "folder"
        return Description(path, kind, manifest.nbytes, manifest.origin)
    nbytes = storage.nbytes(inside)
    with storage.open(inside) as file:
        origin = None if _is_legacy(file) else _origin(_open_archive(file, path), path)
        return Description(path, "torch.save" if origin is None else "single", nbytes, origin)


def verify(path: str, *, find_storage: FindStorage = storage_of) -> Description:
    """:func:`describe`, after reading everything and comparing it with the checksums.

    A file of torch.save has a checksum for every record, but not for its headers; before torch 1.6
    it had none.
    """
    storage, inside = find_storage(path)
    if storage.is_folder(inside):
        verify_files(path, storage, inside, read_manifest(path, storage, inside))
    else:
        with storage.open(inside) as file:
            if not _is_legacy(file):
                _verify_file(path, file)
    return describe(path, find_storage=find_storage)


def _is_legacy(file: Any) -> bool:
    """Whether it is a bare pickle, as torch wrote them before 1.6 and still reads them."""
    file.seek(0)
    return bool(file.read(1) == b"\x80")


def _verify_file(path: str, file: Any) -> None:
    archive = _open_archive(file, path)
    if _origin(archive, path) is not None:
        _verify_archive(file, archive, path)
        return
    with _damage_is_corruption(path, "a header is damaged"):
        damaged = archive.testzip()
    if damaged is not None:
        raise CorruptCheckpointError(path, f"{damaged} has changed since it was written")


def read_manifest(path: str, storage: Storage, inside: str) -> Manifest:
    name = f"{inside}/{NAME}"
    if not storage.exists(name):
        raise CorruptCheckpointError(path, f"it has no {NAME}, which is written last")
    try:
        return Manifest.from_json(storage.read(name), path=path)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(path, str(error)) from error


def verify_files(path: str, storage: Storage, inside: str, manifest: Manifest) -> None:
    """Read all files of a folder and compare them with what ``manifest`` says.

    Raises:
        CorruptCheckpointError: one is missing, or other than it should be.
    """
    for file in manifest.files:
        name = f"{inside}/{file.name}"
        if not storage.exists(name):
            raise CorruptCheckpointError(path, f"{file.name} is missing")
        if (nbytes := storage.nbytes(name)) != file.nbytes:
            raise CorruptCheckpointError(
                path, f"{file.name} has {nbytes} bytes and should have {file.nbytes}"
            )
        with storage.open(name) as opened:
            if crc32(_slices(opened, file.nbytes)) != file.crc32:
                raise CorruptCheckpointError(path, f"{file.name} has changed since it was written")


@contextmanager
def _damage_is_corruption(path: str, what: str) -> Iterator[None]:
    # zipfile has a different exception for every bit that can be wrong.
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # of the disk; a seek to a damaged offset is invalid
        raise CorruptCheckpointError(path, f"{what} ({error})") from error


def _open_archive(file: Any, path: str) -> zipfile.ZipFile:
    with _damage_is_corruption(path, "its end is missing or damaged"):
        return zipfile.ZipFile(file)


def _origin(archive: zipfile.ZipFile, path: str) -> Origin | None:
    found = [name for name in archive.namelist() if name.endswith(f"/{RECORD}")]
    if not found:
        if not any(name.endswith("/data.pkl") for name in archive.namelist()):
            raise CorruptCheckpointError(path, "it is not a file of torch.save")
        return None
    with _damage_is_corruption(path, "its description is damaged"):
        return Origin.from_json(archive.read(found[0]), path=path)


def _verify_archive(file: Any, archive: zipfile.ZipFile, path: str) -> None:
    """Make the headers again and compare all bytes."""
    expected = Archive()
    file.seek(0)
    for entry in archive.infolist():
        name = entry.filename.removeprefix(f"{ROOT}/")
        header = expected.header(name, entry.file_size, entry.CRC)
        if file.read(len(header)) != header:
            raise CorruptCheckpointError(path, f"the header of {name} is damaged")
        if crc32(_slices(file, entry.file_size)) != entry.CRC:
            raise CorruptCheckpointError(path, f"{name} has changed since it was written")
    if file.read() != expected.trailer():
        raise CorruptCheckpointError(path, "the central directory is damaged")


def _slices(file: Any, nbytes: int) -> Iterator[bytes]:
    while nbytes > 0 and (data := file.read(min(nbytes, SLICE))):
        nbytes -= len(data)
        yield data


SUFFIX = ".ckpt"


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder, or what looks like one.

    Exactly one of ``description`` and ``problem`` is set.

    Args:
        verified: all of its bytes have been read, and are what was written or damaged.
    """

    path: str
    description: Description | None
    problem: str = ""
    verified: bool = False


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
        found = (
            checkpoint.description.origin
            for checkpoint in checkpoints(folder)
            if checkpoint.description
        )
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
    found = [
        checkpoint.description
        for checkpoint in reversed(checkpoints(folder))
        if checkpoint.description
    ]
    own = [
        description
        for description in found
        if description.origin and description.origin.run == run and is_original(description)
    ]
    paths = [description.path for description in own]
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
