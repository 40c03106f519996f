"""Bytes of a snapshot on their way into files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from lightning_dist.checkpoint.disk.archive import Archive, combined
from lightning_dist.checkpoint.disk.jobs import Save, SaveFile, SaveFolder
from lightning_dist.checkpoint.disk.manifest import RECORD, File, Part
from lightning_dist.checkpoint.disk.storage import Sink, Storage
from lightning_dist.checkpoint.disk.storage.base import SLICE


def write_archive(sink: Sink, save: SaveFile, snapshot: memoryview) -> int:
    """Write ``save`` as one archive; returns its bytes. Every piece is a whole record."""
    archive = Archive()
    names = [RECORD, *(piece.record for piece in save.pieces)]
    contents = [memoryview(save.origin.to_json()), *_contents(save, snapshot)]
    for name, (content, checksum) in zip(names, with_checksums(contents), strict=True):
        sink.write(archive.header(name, content.nbytes, checksum))
        sink.write(content)
    trailer = archive.trailer()
    sink.write(trailer)
    return archive.position + len(trailer)


def _contents(save: Save, snapshot: memoryview) -> list[memoryview]:
    return [snapshot[piece.offset : piece.offset + piece.nbytes] for piece in save.pieces]


def with_checksums(contents: list[memoryview]) -> Iterator[tuple[memoryview, int]]:
    """Each with its CRC-32, which a thread finds ahead: it takes about as long as the writing."""
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-crc") as helper:
        yield from zip(contents, helper.map(zlib.crc32, contents), strict=True)


def write_shard(
    sink: Sink, name: str, save: SaveFolder, snapshot: memoryview
) -> tuple[File, list[Part]]:
    """Write this rank's pieces, one after the other.

    Returns:
        the file, and where in it the pieces are, in their order.
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
    """Bytes of the pieces and the files of ``save``; a file that is missing counts as empty."""
    nbytes = sum(piece.nbytes for piece in save.pieces)
    for _, path in save.files if isinstance(save, SaveFolder) else ():
        with suppress(OSError):
            nbytes += os.stat(path).st_size
    return nbytes
