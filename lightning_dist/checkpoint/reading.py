"""Reads checkpoints of every format, on any number of ranks."""

from __future__ import annotations

import io
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_dist.checkpoint.disk.archive import Archive, combined
from lightning_dist.checkpoint.disk.errors import CheckpointError, no_checkpoint
from lightning_dist.checkpoint.disk.manifest import NAME, RECORD, Manifest, Part
from lightning_dist.checkpoint.disk.storage import Storage, storage_of
from lightning_dist.checkpoint.disk.storage.base import SLICE
from lightning_dist.checkpoint.disk.verify import describe, read_manifest, verify
from lightning_dist.checkpoint.restricted import restricted_load


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
