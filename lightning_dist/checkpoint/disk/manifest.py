"""Description of a checkpoint: a record of a single file, or the manifest of a folder."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_dist.checkpoint.disk.errors import CheckpointError

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
    """A run of bytes of a record, and where it lies in a file of the folder.

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
