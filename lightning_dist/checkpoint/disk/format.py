"""Format of a checkpoint: its archive, its manifest, and the errors of those who read it.

The archive is the zip file that ``torch.save`` writes and ``torch.load`` reads. Records are stored
uncompressed and begin at multiples of 64 bytes. The local headers carry size and CRC-32, and
nothing in the file depends on chance or time, so a reader can make the same headers again and
compare: there is no byte whose change goes unseen (``verify`` in :mod:`.scan`).

Format: PKWARE's APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14
to 4.3.16 (its end, with zip64).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

ROOT = "archive"
"""torch takes the first folder of an archive as its name; any will do."""

_ALIGNMENT = 64
_UTF8 = 0x0800
_LIMIT = 0xFFFFFFFF
_POLYNOMIAL = 0xEDB88320
"""CRC-32 of zip and zlib, lowest power of x in the highest bit."""
_PADDING = b"FB"
"""The tag of the extra field that torch pads its headers with."""


@dataclass(frozen=True, slots=True)
class Record:
    """One file of an archive."""

    name: str
    nbytes: int
    crc32: int
    offset: int
    """of the local header, in bytes from the start of the archive."""


class Archive:
    """Headers of an archive that is written from its first byte to its last.

    After :meth:`header` come the ``nbytes`` of that record, and after the last record the
    :meth:`trailer`.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.position = 0

    def header(self, name: str, nbytes: int, crc32: int) -> bytes:
        """The bytes before a record: its local header, padded to the alignment."""
        record = Record(f"{ROOT}/{name}", nbytes, crc32, self.position)
        encoded = record.name.encode()
        large = nbytes >= _LIMIT
        size = _LIMIT if large else nbytes
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if large else b""
        fixed = 30 + len(encoded) + len(extra) + 4
        padding = -(self.position + fixed) % _ALIGNMENT
        extra += struct.pack("<2sH", _PADDING, padding) + b"Z" * padding
        head = struct.pack(
            "<4s5H3I2H",
            b"PK\x03\x04", *(45 if large else 20, _UTF8, 0, 0, 0),
            *(crc32, size, size), len(encoded), len(extra),
        )  # fmt: skip
        self.records.append(record)
        self.position += len(head) + len(encoded) + len(extra) + nbytes
        return head + encoded + extra

    def trailer(self) -> bytes:
        """The bytes after the last record: the central directory and its end."""
        directory = b"".join(map(_central, self.records))
        count, start = len(self.records), self.position
        end64 = struct.pack(
            "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start
        )
        locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(directory), 1)
        few = min(count, 0xFFFF)
        end = struct.pack(
            "<4s4H2IH", b"PK\x05\x06", 0, 0, few, few,
            min(len(directory), _LIMIT), min(start, _LIMIT), 0,
        )  # fmt: skip
        return directory + end64 + locator + end


def _central(record: Record) -> bytes:
    encoded = record.name.encode()
    large = [value for value in (record.nbytes, record.nbytes, record.offset) if value >= _LIMIT]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    size, offset = min(record.nbytes, _LIMIT), min(record.offset, _LIMIT)
    head = struct.pack(
        "<4s6H3I5H2I",
        b"PK\x01\x02", *(45, 45 if large else 20, _UTF8, 0, 0, 0),
        *(record.crc32, size, size),
        *(len(encoded), len(extra), 0, 0, 0), *(0, offset),
    )  # fmt: skip
    return head + encoded + extra


def archive_nbytes(sizes: list[tuple[str, int]]) -> int:
    """Bytes of an archive with records of these names and sizes."""
    archive = Archive()
    for name, nbytes in sizes:
        archive.header(name, nbytes, 0)
    return archive.position + len(archive.trailer())


def crc32(chunks: Iterable[bytes | memoryview]) -> int:
    """CRC-32 of the chunks, one after the other."""
    value = 0
    for chunk in chunks:
        value = zlib.crc32(chunk, value)
    return value


def _times(a: int, b: int) -> int:
    """``a * b`` modulo the polynomial, over GF(2)."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


def combine(first: int, second: int, nbytes: int) -> int:
    """CRC-32 of ``A + B``, from the CRC-32 of ``A``, that of ``B`` and the length of ``B``.

    Appending n bytes multiplies a CRC by x^(8n); the power is found by squaring, as in zlib's
    ``crc32_combine``.
    """
    power, square = 1 << 31, 1 << 23  # x^0 and x^8
    while nbytes:
        if nbytes & 1:
            power = _times(square, power)
        square = _times(square, square)
        nbytes >>= 1
    return _times(power, first) ^ second


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of parts given as ``(crc32, nbytes)``, in order."""
    value = 0
    for crc, nbytes in parts:
        value = combine(value, crc, nbytes)
    return value


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class DroppedCheckpointError(CheckpointError):
    """A snapshot was given up before it was written; nothing is wrong with the disk."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is incomplete, or its bytes are not those that were written.

    Attributes:
        path: of the checkpoint.
        reason: what was found, and where.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is not a complete checkpoint: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type[CorruptCheckpointError], tuple[str, str]]:
        return type(self), (self.path, self.reason)


def no_checkpoint(path: str) -> FileNotFoundError:
    """The error where nothing is at ``path``."""
    return FileNotFoundError(
        f"There is no checkpoint at {path}; lightning-dist ckpt ls DIR lists those of a folder"
    )


FORMAT = "lightning_dist.checkpoint"
VERSION = 1
NAME = "manifest.json"
RECORD = "lightning_dist.json"
"""Name of the record with the :class:`Origin` in a single file."""


@dataclass(frozen=True)
class Origin:
    """The save that made a checkpoint."""

    save_id: str
    step: int
    created_ns: int
    """Wall-clock time of the snapshot, in nanoseconds since 1970; for people, not for ordering."""
    ranks: int = 1
    """World size of the job."""
    resumable: bool = True
    """Whether a training can go on from it; weights alone are not enough."""
    order: int = 0
    """Greater than that of every checkpoint that was in the folder before, whatever the clocks of
    the hosts say: the newest checkpoint has the greatest."""
    name: str = ""
    """Name under which it was saved. A copy or link that somebody else made has another one."""
    run: str = ""
    """Run that saved it; empty where runs have no names."""

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, text: bytes | str, *, path: str) -> Origin:
        """Raises CheckpointError if a newer version wrote it, ValueError if it is not one."""
        return cls._of(json.loads(text), path)

    @classmethod
    def _of(cls, fields: Mapping[str, Any], path: str) -> Origin:
        if not isinstance(fields, Mapping) or fields.get("format") != FORMAT:
            raise ValueError(f"{path} has no {FORMAT} description")
        if fields["version"] > VERSION:
            raise CheckpointError(
                f"{path} was written by a newer lightning_dist (format {fields['version']}, this "
                f"one reads up to {VERSION}); upgrade lightning_dist, or consolidate it there"
            )
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


@dataclass(frozen=True, slots=True)
class Part:
    """Contiguous bytes of a record, and where it lies in a file of the folder.

    Without a file it is zeros.
    """

    file: str
    offset: int
    nbytes: int
    crc32: int

    def __post_init__(self) -> None:
        if self.file:
            _require_inside(self.file)


def zeros(nbytes: int) -> Part:
    """A part that no file holds."""
    checksum, block = 0, bytes(1 << 20)
    for start in range(0, nbytes, len(block)):
        checksum = zlib.crc32(block[: nbytes - start], checksum)
    return Part("", 0, nbytes, checksum)


@dataclass(frozen=True, slots=True)
class File:
    """A file of the folder."""

    name: str
    nbytes: int
    crc32: int

    def __post_init__(self) -> None:
        _require_inside(self.name)


def _require_inside(name: str) -> None:
    """Raise ValueError for a file that is not in the folder, or in one within it."""
    if {"", ".", ".."} & {*name.split("/")}:
        raise ValueError(f"a checkpoint must have its files in its own folder, got {name!r}")


@dataclass(frozen=True)
class Manifest:
    """Everything that belongs to a folder. A folder without a manifest is not a checkpoint."""

    origin: Origin
    files: tuple[File, ...]
    records: Mapping[str, tuple[Part, ...]]
    """The records of the archive that the shards hold together, in the archive's order. Empty for
    a folder of ordinary files."""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def to_json(self) -> bytes:
        body = {
            **json.loads(self.origin.to_json()),
            "files": [asdict(file) for file in self.files],
            "records": {n: [asdict(p) for p in parts] for n, parts in self.records.items()},
        }
        return json.dumps({"body": body, "crc32": _crc32(body)}).encode()

    @classmethod
    def from_json(cls, text: bytes | str, *, path: str) -> Manifest:
        """Raises CheckpointError if a newer version wrote it, ValueError if it is damaged."""
        outer = json.loads(text)
        if not isinstance(outer, dict) or set(outer) != {"crc32", "body"}:
            raise ValueError("the manifest is not one of lightning_dist")
        fields = outer["body"]
        if _crc32(fields) != outer["crc32"]:
            raise ValueError("the manifest has changed since it was written")
        return cls(
            Origin._of(fields, path),
            tuple(File(**file) for file in fields["files"]),
            {name: tuple(Part(**p) for p in parts) for name, parts in fields["records"].items()},
        )


def _crc32(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
