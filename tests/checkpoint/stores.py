"""Storages for tests: an object store in memory, and a local folder that fails as scripted."""

import errno
import os
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from lightning_dist.checkpoint.disk.storage import Bytes, LocalStorage, Sink, Storage


class Bucket(AbstractFileSystem):
    """Objects with keys: they appear when they are complete, and nothing is ever renamed.

    As in S3 a folder is there as long as a key begins with its name, and a file that is garbage
    collected without having been closed is uploaded.
    """

    protocol = "bucket"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    uploads: ClassVar[list[str]] = []
    """Keys, in the order in which they became complete."""
    removed: ClassVar[list[str]] = []

    def _open(self, path: str, mode: str = "rb", **_: Any) -> AbstractBufferedFile:
        size = None if mode == "wb" else self.info(path)["size"]
        return _Object(self, path, mode, size=size)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path).rstrip("/")
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(key.startswith(f"{path}/") for key in list(self.objects)):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path).rstrip("/")
        below = [key for key in list(self.objects) if key.startswith(f"{path}/")]
        names = sorted({f"{path}/{key[len(path) + 1 :].split('/')[0]}" for key in below})
        return [self.info(name) for name in names] if detail else names

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self.put(path2, self.objects[path1])

    def put(self, key: str, content: bytes) -> None:
        self.objects[key] = content
        self.uploads.append(key)

    def rm_file(self, path: str) -> None:
        if self.objects.pop(path, None) is not None:  # else a folder, which is no object
            self.removed.append(path)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        raise NotImplementedError("objects cannot be renamed")


class _Object(AbstractBufferedFile):
    """Aborting an upload is ``discard``, as in s3fs."""

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.buffer.seek(0)
            self.fs.put(self.path, self.buffer.read())
        return final

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.objects[self.path][start:end])


fsspec.register_implementation("bucket", Bucket, clobber=True)


class FaultyStorage(LocalStorage):
    """A local folder where ``before`` is called with the path and position of every write.

    It may raise, or return how many bytes to write at most.
    """

    def __init__(self, before: Callable[[str, int], None]) -> None:
        self._before = before

    def create(self, path: str) -> Sink:
        return _FaultySink(super().create(path), path, self._before)

    def find(self, path: str) -> tuple[Storage, str]:
        return self, os.path.abspath(path)


class _FaultySink:
    def __init__(self, sink: Sink, path: str, before: Callable[[str, int], None]) -> None:
        self._sink, self._path, self._before = sink, path, before
        self._position = 0
        self.close, self.abort = sink.close, sink.abort

    def write(self, data: Bytes) -> None:
        self._before(self._path, self._position)
        self._sink.write(data)
        self._position += memoryview(data).nbytes


def broken_disk(path: str, position: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), path)
