"""An object store behind fsspec."""

from __future__ import annotations

from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from lightning_dist.checkpoint.disk.base import SLICE, Bytes, Sink, Storage, manifest_last


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
