"""Checkpoints read back, with the restricted unpickler or without it.

Under ``weights_only=True`` unpickling must run no code. The unpickler of
``torch.load(weights_only=True)`` makes tensors, plain values, and what
``torch.serialization.add_safe_globals`` allows. What is saved is proved to load that way.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dist.checkpoint.disk.format import (
    NAME,
    RECORD,
    Archive,
    CheckpointError,
    Manifest,
    Part,
    combined,
    no_checkpoint,
)
from lightning_dist.checkpoint.disk.scan import describe, read_manifest, verify
from lightning_dist.checkpoint.disk.storage import Storage, storage_of
from lightning_dist.checkpoint.disk.storage.base import SLICE
from lightning_dist.checkpoint.snapshot.plan import Pickled, pickled

_REMEDY = (
    "save plain values instead (str(path)), allow the type with "
    "torch.serialization.add_safe_globals([...]) in every start, or give weights_only=False, which "
    "runs any code in the file; do so only if you trust everyone who can write there"
)


def require_loadable(state: Any, content: Pickled | None = None, *, name: str) -> None:
    """Prove that what is about to be saved can be read again.

    Args:
        content: of ``state``, if it is pickled already.
        name: of ``state``, for the message.

    Raises:
        ValueError: the restricted unpickler does not read it; names what, and where it is.
    """
    if _is_loadable(state, content or pickled(state)):
        return
    name, value = _culprit(state, name)
    kind = value if isinstance(value, type) else type(value)
    what = f"{'the class' if kind is value else 'a'} {kind.__module__}.{kind.__qualname__}"
    raise ValueError(
        f"{name} is {what}, which torch.load(weights_only=True) does not read, so no run could "
        f"resume from the checkpoint; {_REMEDY}"
    )


def restricted_load(file: Any, *, path: str, map_location: Any, weights_only: bool | None) -> Any:
    """``torch.load``, which says what to do where the restricted unpickler refuses.

    Args:
        file: open, at its beginning.
        path: of ``file``, for the message.

    Raises:
        ValueError: it holds types that the restricted unpickler does not make.
    """
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if weights_only is False or not (names := _unsafe_in(file)):
            raise
        raise _refusal(path, names) from error


def problem_with(
    file: Any, *, path: str, load: Callable[..., Any], whole: Callable[[], Any] | None = None
) -> ValueError | None:
    """Reason why the restricted unpickler cannot read a file of ``torch.save``; None if it can.

    Args:
        file: open, at its beginning.
        path: of ``file``, for the message.
        load: ``torch.load``, or what stands in for it.
        whole: the file to read where tensors have to be read too; None: ``file``.
    """
    try:
        load(file, map_location="meta", weights_only=True)  # nothing of tensors is read
        return None
    except pickle.UnpicklingError as error:
        return _refusal(path, _unsafe_in(file) or str(error))
    except Exception:  # nested and quantized tensors cannot be on "meta"
        file.seek(0)
    try:  # to the end: nothing is said of what comes after the tensor that failed
        file = file if whole is None else whole()
        load(file, map_location="cpu", weights_only=True)
        return None
    except pickle.UnpicklingError as error:
        return _refusal(path, _unsafe_in(file) or str(error))
    except Exception as error:
        return _refusal(path, f"what raises {type(error).__name__} ({error})")


def _refusal(path: str, names: str) -> ValueError:
    return ValueError(
        f"{path} holds {names}, which torch.load(weights_only=True) does not read; {_REMEDY}"
    )


def _is_loadable(state: Any, content: Pickled) -> bool:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content.data)
        archive.writestr("archive/version", b"3\n")
        for index in range(len(content.storages)):  # on "meta" nothing of them is read
            archive.writestr(f"archive/data/{index}", b"")
    file.seek(0)
    problem = problem_with(file, path="", load=torch.load, whole=lambda: _saved(state))
    return problem is None


def _saved(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def _culprit(state: Any, name: str) -> tuple[str, Any]:
    """Name and value of the innermost part of ``state`` that cannot be read."""
    parts: Any = ()
    if isinstance(state, Mapping):
        parts = state.items()
    elif isinstance(state, list | tuple):
        parts = enumerate(state)
    for key, part in parts:
        if not _is_loadable(part, pickled(part)):
            return _culprit(part, f"{name}[{key!r}]")
    return name, state


def _unsafe_in(file: Any) -> str:
    file.seek(0)
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
    except Exception:  # of another format, or damaged
        return ""


def load(
    path: str, *, check: bool = True, map_location: Any = None, weights_only: bool | None = None
) -> Any:
    """The state that was saved as ``path``, a single file or a folder of shards.

    Args:
        path: a path or URL; of a folder of shards also that of its manifest.
        check: compare all bytes with their checksums before anything is made of them.
        map_location: as of ``torch.load``.
        weights_only: as of ``torch.load``.

    Raises:
        FileNotFoundError: nothing is there.
        CorruptCheckpointError: it is incomplete, or has changed since it was written.
        CheckpointError: a newer version of this package wrote it, or it holds no state.
        ValueError: ``weights_only`` does not let it be read.
    """
    path = path.removesuffix(f"/{NAME}")
    with opened(path, check=check) as file:
        return restricted_load(
            file, path=path, map_location=map_location, weights_only=weights_only
        )


@contextmanager
def opened(path: str, *, check: bool) -> Iterator[Any]:
    """The checkpoint at ``path`` as one file of torch.save; a folder of shards too.

    Raises:
        FileNotFoundError: nothing is there.
        CorruptCheckpointError: it is incomplete, or has changed since it was written.
        CheckpointError: a newer version of this package wrote it, or it holds no state.
    """
    storage, inside = storage_of(path)
    if not storage.exists(inside):
        raise no_checkpoint(path)
    description = verify(path) if check else describe(path)
    if description.kind == "folder":
        raise CheckpointError(
            f"{path} is a folder of AsyncStateCheckpointer; load it with AsyncStateCheckpointer"
        )
    file: Any = storage.open(inside) if description.kind != "sharded" else None
    with file or _ShardedFile(storage, inside, read_manifest(path, storage, inside)) as file:
        yield file


def consolidate(source: str, target: str) -> int:
    """Write a folder of shards as one file for ``torch.load``; returns its bytes.

    Raises:
        ValueError: ``source`` is no folder of shards, or ``target`` exists.
        CorruptCheckpointError: ``source`` is incomplete, or has changed since it was written.
    """
    storage, inside = storage_of(source)
    if not storage.exists(inside) or verify(source).kind != "sharded":
        raise ValueError(f"Only a folder of shards can be consolidated, got {source}")
    goal, path = storage_of(target)
    if goal.exists(path):
        raise ValueError(f"{target} exists; remove it first, or choose another name")
    manifest = read_manifest(source, storage, inside)
    # A trainer that owns the folder clears away what has a name of its own savings.
    staged = goal.staging(path, f"c{manifest.origin.save_id}")
    sink = goal.create(staged)
    try:
        with _ShardedFile(storage, inside, manifest) as file:
            while data := file.read(SLICE):
                sink.write(data)
    except BaseException:
        sink.abort()
        if staged != path:
            goal.remove(staged)
        raise
    sink.close()
    goal.publish(staged, path)
    return goal.nbytes(path)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Bytes of the archive from ``start``: given ones, of a file from ``offset``, or zeros."""

    start: int
    nbytes: int
    content: bytes = b""
    file: str = ""
    offset: int = 0


class _ShardedFile(io.RawIOBase):
    """The archive that the shards of a folder hold together, read as if it were one file."""

    def __init__(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        super().__init__()
        self._open: Callable[[str], Any] = lambda name: storage.open(f"{folder}/{name}")
        self._files: dict[str, Any] = {}
        self._segments = _segments(manifest)
        self._starts = [segment.start for segment in self._segments]
        self._nbytes = self._segments[-1].start + self._segments[-1].nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < view.nbytes and self._position < self._nbytes:
            segment = self._segments[bisect_right(self._starts, self._position) - 1]
            skip = self._position - segment.start
            count = min(view.nbytes - filled, segment.nbytes - skip)
            view[filled : filled + count] = self._read(segment, skip, count)
            filled += count
            self._position += count
        return filled

    def _read(self, segment: _Segment, skip: int, count: int) -> bytes:
        if segment.content:
            return segment.content[skip : skip + count]
        if not segment.file:
            return bytes(count)
        if segment.file not in self._files:
            self._files[segment.file] = self._open(segment.file)
        file = self._files[segment.file]
        file.seek(segment.offset + skip)
        return bytes(file.read(count))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        super().close()


def _segments(manifest: Manifest) -> list[_Segment]:
    archive, description = Archive(), manifest.origin.to_json()
    found: list[bytes | Part] = [
        archive.header(RECORD, len(description), zlib.crc32(description)),
        description,
    ]
    for record, parts in manifest.records.items():
        checksum = combined((part.crc32, part.nbytes) for part in parts)
        found.append(archive.header(record, sum(part.nbytes for part in parts), checksum))
        found.extend(parts)
    found.append(archive.trailer())
    segments, position = [], 0
    for item in found:
        if isinstance(item, bytes):
            segments.append(_Segment(position, len(item), content=item))
        elif item.nbytes:
            segments.append(_Segment(position, item.nbytes, file=item.file, offset=item.offset))
        position = segments[-1].start + segments[-1].nbytes
    return segments
