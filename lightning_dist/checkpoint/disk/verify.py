"""Whether a checkpoint is what was written, to the last bit; known before anything is loaded."""

from __future__ import annotations

import errno
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lightning_dist.checkpoint.disk.manifest import NAME
from lightning_dist.checkpoint.disk.archive import ROOT, Archive, crc32
from lightning_dist.checkpoint.disk.errors import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.manifest import RECORD, Manifest, Origin
from lightning_dist.checkpoint.disk.storage import Storage, storage_of
from lightning_dist.checkpoint.disk.storage.base import SLICE

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
