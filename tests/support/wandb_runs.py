"""Reads a wandb run back that was written offline: records in the format of LevelDB's log."""

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK, _CHUNK = 7, 32768, 7
_WHOLE, _LAST = 1, 4
_PATIENCE = 30.0
"""Seconds for wandb's service, which still writes when ``wandb.finish()`` has returned."""


def records(path: Path) -> list[Any]:
    """Every record of a ``run-<id>.wandb`` whose run has ended: its last one says so."""
    until = time.monotonic() + _PATIENCE
    while not (found := list(written(path))) or not found[-1].HasField("exit"):
        assert time.monotonic() < until, f"{path} has no end after {len(found)} records"
        os.sched_yield()
    return found


def written(path: Path) -> Iterator[Any]:
    """Every record so far; a process that was killed has left its run without an end."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    if len(content) < _HEADER:
        return
    assert content[:4] == b":W&B"
    position, parts = _HEADER, b""
    while position + _CHUNK <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _CHUNK:  # the rest of a block that no chunk fits into
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        if position + _CHUNK + length > len(content):  # it is being written
            return
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


def config(path: Path) -> dict[str, Any]:
    """The configuration of the run, as it was in the end."""
    found: dict[str, Any] = {}
    for record in records(path):
        started = record.run.config if record.HasField("run") else record.config
        for item in started.update:
            _put(found, list(item.nested_key) or [item.key], json.loads(item.value_json))
    return found


def _put(into: dict[str, Any], keys: list[str], value: Any) -> None:
    *outer, last = keys
    for key in outer:
        into = into.setdefault(key, {})
    into[last] = value
