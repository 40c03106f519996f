"""Does the jobs of one trainer, one after the other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial

from lightning_dist.checkpoint.disk.archive import archive_nbytes
from lightning_dist.checkpoint.disk.errors import CheckpointError, DroppedCheckpointError
from lightning_dist.checkpoint.disk.folder import SharedFolder
from lightning_dist.checkpoint.disk.jobs import (
    Committed,
    Done,
    Event,
    Failed,
    Job,
    Link,
    Remove,
    Save,
    SaveFile,
    SaveFolder,
)
from lightning_dist.checkpoint.disk.manifest import RECORD
from lightning_dist.checkpoint.disk.storage import Storage, storage_of
from lightning_dist.checkpoint.disk.verify import verify
from lightning_dist.checkpoint.disk.writing import content_nbytes, write_archive


class Writer:
    """Writes, publishes, links and removes, in the order of the jobs.

    Nothing is removed before a save that came later has been committed: after a failure, removals
    wait for the next success.

    Args:
        report: takes what became of every job.
        read_back: read and check every checkpoint before it is published.
        orphaned: whether the trainer is dead.
        find_storage: the storage of a path; another one for tests of faults.
    """

    def __init__(
        self,
        *,
        report: Callable[[Event], None],
        read_back: bool = False,
        orphaned: Callable[[], bool] = lambda: False,
        find_storage: Callable[[str], tuple[Storage, str]] = storage_of,
    ) -> None:
        self._report = report
        self._read_back = read_back
        self._orphaned = orphaned
        self._find_storage = find_storage
        self._failed = False
        self._pending_deletions: dict[str, None] = {}

    def do(self, job: Job, snapshot: memoryview) -> None:
        """Do one job and report it; raises nothing but what ends the process.

        Args:
            snapshot: what the pieces of a save lie in.
        """
        try:
            if isinstance(job, Save):
                self._save(job, snapshot)
            elif isinstance(job, Link):
                self._link(job)
            elif isinstance(job, Remove):
                self._pending_deletions[job.target] = None
            else:
                self._pending_deletions.pop(job.target, None)
            failures = {} if self._failed else self._remove_pending()
            if job.target in failures and not isinstance(job, Save):
                raise failures[job.target]
            if not isinstance(job, Save):
                self._report(Done(job.target, waits=job.target in self._pending_deletions))
        except Exception as error:
            origin = job.origin if isinstance(job, Save) else None
            dropped = isinstance(error, DroppedCheckpointError)
            self._report(Failed(job.target, origin, _reason(error), dropped))
        finally:
            if isinstance(job, SaveFolder) and job.scratch:
                shutil.rmtree(job.scratch, ignore_errors=True)

    def _save(self, save: Save, snapshot: memoryview) -> None:
        began = time.monotonic()
        self._failed = True  # until it has been committed
        self._pending_deletions.pop(save.target, None)
        if save.dropped and isinstance(save, SaveFile):
            raise DroppedCheckpointError(save.dropped)
        storage, target = self._find_storage(save.target)
        folder = os.path.dirname(target)
        storage.make_folder(folder)
        require_space = partial(_require_space, storage, save, target)
        if isinstance(save, SaveFolder):
            shared = SharedFolder(
                save, storage, target, self._orphaned, require_space, self._read_back
            )
            try:
                nbytes, total = shared.write(snapshot)
            except Exception:
                if save.rank == 0 and save.origin.ranks > 1:
                    self._pending_deletions[shared.remains] = None
                raise
        else:
            assert isinstance(save, SaveFile)
            require_space()
            nbytes = total = self._save_file(save, storage, target, snapshot)
        self._failed = False
        seconds = time.monotonic() - began
        self._report(Committed(save.target, save.origin, nbytes, seconds, total))

    def _save_file(
        self, save: SaveFile, storage: Storage, target: str, snapshot: memoryview
    ) -> int:
        staged = storage.staging(target, save.origin.save_id)
        try:
            with storage.creating(staged) as sink:
                nbytes = write_archive(sink, save, snapshot)
            if self._read_back:
                verify(staged, find_storage=lambda path: (storage, path))
            storage.publish(staged, target)
        except BaseException:
            if staged != target:
                storage.remove(staged)
            raise
        return nbytes

    def _link(self, link: Link) -> None:
        if not self._failed:  # what it would show has been reported already
            storage, source = self._find_storage(link.source)
            storage.link(source, self._find_storage(link.target)[1], symbolic=link.symbolic)

    def _remove_pending(self) -> dict[str, Exception]:
        """Remove what may go; what cannot be removed is tried again with the next job."""
        failures: dict[str, Exception] = {}
        for path in list(self._pending_deletions):
            try:
                storage, inside = self._find_storage(path)
                storage.remove(inside)
                del self._pending_deletions[path]
            except Exception as error:
                failures[path] = error
        return failures


def _require_space(storage: Storage, save: Save, target: str) -> None:
    needed = _nbytes(save)
    free = storage.free_bytes(target)
    if free is not None and free < needed:
        raise CheckpointError(
            f"no space: needs {needed / 1e6:.1f} MB beside the checkpoints that are kept until it "
            f"is complete, and {free / 1e6:.1f} MB are free in {os.path.dirname(target)}"
        )


def _nbytes(save: Save) -> int:
    if isinstance(save, SaveFile):
        described = (RECORD, len(save.origin.to_json()))
        return archive_nbytes([described, *((p.record, p.nbytes) for p in save.pieces)])
    return content_nbytes(save)


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
