"""Storage for checkpoints: a local (or mounted) directory, or an object store behind fsspec.

Both promise the same: what is staged is not there for a reader until it is published, publishing
replaces what had that name, and nothing else can be seen by anybody, whatever is killed when.

========  =================================  ==================================================
          local                              object store
========  =================================  ==================================================
staged    ``.name.tmp-ID`` beside the name   at its final keys; shards carry the ID in theirs
durable   fsync of file and folder           when the upload is complete
publish   rename                             the single object appears when it is complete; of a
                                             folder the manifest is uploaded last
========  =================================  ==================================================
"""

from __future__ import annotations

import os

from lightning_dist.checkpoint.disk.storage.base import Bytes as Bytes
from lightning_dist.checkpoint.disk.storage.base import Sink as Sink
from lightning_dist.checkpoint.disk.storage.base import Storage as Storage
from lightning_dist.checkpoint.disk.storage.local import LocalStorage as LocalStorage
from lightning_dist.checkpoint.disk.storage.objects import ObjectStorage as ObjectStorage


def storage_of(path: str) -> tuple[Storage, str]:
    """The storage of a path or URL, and the path within it."""
    if "://" not in path:
        return LocalStorage(), os.path.abspath(os.path.expanduser(path))
    import fsspec  # not needed, and not there in the writer, for local paths

    filesystem, inside = fsspec.core.url_to_fs(path)
    if "file" in (filesystem.protocol, *filesystem.protocol):
        return LocalStorage(), os.path.abspath(inside)
    return ObjectStorage(filesystem), inside
