"""An object store behind fsspec."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from lightning_dist.checkpoint.disk.format import NAME
from lightning_dist.checkpoint.disk.storage.base import SLICE, Bytes, Sink, Storage, manifest_last

_PART = re.compile(r"(?:shard-\d{5}-of-\d{5}-|\.rank-\d+\.)([0-9a-f]{16})\.(?:bin|json)")
"""Names of what ranks upload before the manifest, with the id of their save."""
_ABANDONED = 24 * 3600.0
"""Seconds without an upload after which nobody is at work on a save: there are no locks to ask."""


class ObjectStorage(Storage):
    """An fsspec filesystem whose files appear when they are complete, and cannot be renamed."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def staging(self, target: str, save_id: str) -> str:
        return target

    def create(self, path: str) -> Sink:
        return _ObjectSink(self._fs.open(path, "wb"))

    def make_folder(self, path: str) -> None:
        self._fs.makedirs(path, exist_ok=True)

    def publish(self, staged: str, target: str) -> None:
        pass

    def link(self, source: str, target: str, *, symbolic: bool = False) -> None:
        if not self._fs.isdir(source):
            self._fs.cp_file(source, target)
            return
        names = self.names(source)
        self.make_folder(target)
        for name in sorted(names, key=manifest_last):
            self._fs.cp_file(f"{source}/{name}", f"{target}/{name}")
        for name in set(self.names(target)) - set(names):  # of what had that name before
            self._fs.rm_file(f"{target}/{name}")

    def remove(self, path: str) -> None:
        if self._fs.isdir(path):
            for name in sorted(self.names(path), key=manifest_last, reverse=True):
                self._fs.rm_file(f"{path}/{name}")
            if self._fs.exists(path):  # a store that knows empty folders
                self._fs.rm(path, recursive=True)
        elif self._fs.exists(path):
            self._fs.rm_file(path)

    def names(self, path: str) -> list[str]:
        if not self._fs.isdir(path):
            return []
        self._fs.invalidate_cache(path)
        return sorted(PurePosixPath(found).name for found in self._fs.ls(path, detail=False))

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(path))

    def is_folder(self, path: str) -> bool:
        return bool(self._fs.isdir(path))

    def nbytes(self, path: str) -> int:
        return int(self._fs.size(path))

    def modified_ns(self, path: str) -> int:
        return int(self._fs.modified(path).timestamp() * 1e9)

    def open(self, path: str) -> Any:
        return self._fs.open(path, "rb")

    def leftovers(self, folder: str) -> list[str]:
        paths = [f"{folder}/{name}" for name in self.names(folder)]
        return [
            path for folder in paths if self.is_folder(folder) for path in self._abandoned(folder)
        ]

    def _abandoned(self, folder: str) -> list[str]:
        """Parts of saves that were killed before their manifest was uploaded."""
        names = self.names(folder)
        saves: dict[str, list[str]] = {}
        for name in names:
            if match := _PART.fullmatch(name):
                saves.setdefault(match[1], []).append(f"{folder}/{name}")
        if NAME in names:
            if len(saves) < 2:
                return []
            try:
                del saves[json.loads(self.read(f"{folder}/{NAME}"))["body"]["save_id"]]
            except (ValueError, KeyError):  # damaged: nobody knows what belongs to it
                return []
        limit = (time.time() - _ABANDONED) * 1e9
        try:
            old = [save for save in saves.values() if max(map(self.modified_ns, save)) < limit]
        except NotImplementedError:  # a store that does not say
            return []
        return [path for save in old for path in save]


class _ObjectSink:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Bytes) -> None:
        view = memoryview(data)
        for start in range(0, view.nbytes, SLICE):
            self._file.write(view[start : start + SLICE])

    def close(self) -> None:
        self._file.close()

    def abort(self) -> None:
        if hasattr(self._file, "discard"):
            self._file.discard()
        with suppress(AttributeError):
            self._file.closed = True  # fsspec would upload what there is when it is collected
