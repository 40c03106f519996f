"""Reads a wandb run back that was written offline: records in the format of LevelDB's log."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK, _CHUNK = 7, 32768, 7
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Every record of a ``run-<id>.wandb``."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    position, parts = _HEADER, b""
    while position + _CHUNK <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _CHUNK:  # the rest of a block that no chunk fits into
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + _CHUNK : position + _CHUNK + length]
        position += _CHUNK + length
        if kind in (_WHOLE, _LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def history(path: Path) -> dict[str, list[str]]:
    """JSON of every value that was logged, by name."""
    found: dict[str, list[str]] = {}
    for record in records(path):
        for item in record.history.item:
            found.setdefault(item.key or "/".join(item.nested_key), []).append(item.value_json)
    return found
