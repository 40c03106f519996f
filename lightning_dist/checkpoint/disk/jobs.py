"""Jobs of the writer of a trainer, what it answers, and the bytes that they write."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from lightning_dist.checkpoint.disk.format import RECORD, Archive, File, Origin, Part, combined
from lightning_dist.checkpoint.disk.storage import Sink, Storage
from lightning_dist.checkpoint.disk.storage.base import SLICE


@dataclass(frozen=True, slots=True)
class RecordRange:
    """Contiguous bytes of a record, from ``start``, and where it lies in the snapshot."""

    record: str
    nbytes: int
    offset: int
    start: int = 0


@dataclass(frozen=True)
class Save:
    """Write a snapshot and publish it."""

    origin: Origin
    target: str
    ranges: tuple[RecordRange, ...]
    """Records that this rank writes, in the order of the archive."""
    dropped: str = field(default="", kw_only=True)
    """Reason why nothing is written; later jobs must know that this one failed."""


@dataclass(frozen=True)
class SaveFile(Save):
    """One file for ``torch.load``: whole records, of one rank."""


@dataclass(frozen=True)
class SaveFolder(Save):
    """A folder that all ranks write to: this rank's shard, and files as they are."""

    rank: int
    records: tuple[str, ...] = ()
    """Names of all records, in the order of the archive."""
    spread: tuple[tuple[str, int], ...] = ()
    """``(record, bytes)`` of those that may have gaps, which are zeros."""
    complete: tuple[tuple[str, int], ...] = ()
    """``(record, bytes)`` of those of which ranks write parts that leave no gaps."""
    files: tuple[tuple[str, str], ...] = ()
    """``(name in the folder, path of the content)``; names may have folders in them."""
    scratch: str = ""
    """A local folder that is removed afterwards, also where the trainer is dead by then."""
    peer_timeout: float = 120.0
    """Seconds in which some rank must have written something."""


@dataclass(frozen=True)
class Link:
    """Show a checkpoint under a second name, once it is there."""

    source: str
    target: str
    symbolic: bool


@dataclass(frozen=True)
class Remove:
    """Remove a checkpoint, but not before a save that came before this has been committed."""

    target: str


@dataclass(frozen=True)
class Keep:
    """Do not remove a checkpoint after all, if its removal still waits."""

    target: str


Job = Save | Link | Remove | Keep


@dataclass(frozen=True)
class Committed:
    """A checkpoint is durable under its name."""

    target: str
    origin: Origin
    nbytes: int
    """written by this rank."""
    seconds: float
    """from the start of writing."""
    total: int
    """Bytes of the checkpoint, written by all ranks."""


@dataclass(frozen=True)
class Failed:
    """A job could not be done; under its name is what was there, or all of the new one."""

    target: str
    origin: Origin | None
    """None for a link or a removal."""
    reason: str
    dropped: bool = False
    """The snapshot was given up before anything was written; the next one will be whole."""


@dataclass(frozen=True)
class Done:
    """A link is there, a checkpoint removed or kept."""

    target: str
    waits: bool = False
    """It is done after the next success."""


@dataclass(frozen=True)
class Owned:
    """The writer keeps other trainers from a folder."""

    folder: str


Event = Committed | Failed | Done


def write_archive(sink: Sink, save: SaveFile, snapshot: memoryview) -> int:
    """Write ``save`` as one archive; returns its bytes. Every record_range is a whole record."""
    archive = Archive()
    names = [RECORD, *(record_range.record for record_range in save.ranges)]
    contents = [memoryview(save.origin.to_json()), *_contents(save, snapshot)]
    for name, (content, checksum) in zip(names, with_checksums(contents), strict=True):
        sink.write(archive.header(name, content.nbytes, checksum))
        sink.write(content)
    trailer = archive.trailer()
    sink.write(trailer)
    return archive.position + len(trailer)


def _contents(save: Save, snapshot: memoryview) -> list[memoryview]:
    return [
        snapshot[record_range.offset : record_range.offset + record_range.nbytes]
        for record_range in save.ranges
    ]


def with_checksums(contents: list[memoryview]) -> Iterator[tuple[memoryview, int]]:
    """Each with its CRC-32, which a thread finds ahead: it takes about as long as the writing."""
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-crc") as helper:
        yield from zip(contents, helper.map(zlib.crc32, contents), strict=True)


def write_shard(
    sink: Sink, name: str, save: SaveFolder, snapshot: memoryview
) -> tuple[File, list[Part]]:
    """Write this rank's ranges, one after the other.

    Returns:
        the file, and where in it the ranges are, in their order.
    """
    parts: list[Part] = []
    position = 0
    for content, checksum in with_checksums(_contents(save, snapshot)):
        parts.append(Part(name, position, content.nbytes, checksum))
        sink.write(content)
        position += content.nbytes
    checksum = combined((part.crc32, part.nbytes) for part in parts)
    return File(name, position, checksum), parts


def copy_file(source: str, storage: Storage, path: str, name: str) -> File:
    """Write the local file ``source`` to ``path``."""
    nbytes = checksum = 0
    with storage.creating(path) as sink, open(source, "rb") as file:
        while data := file.read(SLICE):
            sink.write(data)
            nbytes += len(data)
            checksum = zlib.crc32(data, checksum)
    return File(name, nbytes, checksum)


def content_nbytes(save: Save) -> int:
    """Bytes of the ranges and the files of ``save``; a file that is missing counts as empty."""
    nbytes = sum(record_range.nbytes for record_range in save.ranges)
    for _, path in save.files if isinstance(save, SaveFolder) else ():
        with suppress(OSError):
            nbytes += os.stat(path).st_size
    return nbytes
