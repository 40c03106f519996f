"""Writer: jobs that are done in order, in a thread or a process of its own.

``main`` is the loop of the writer process, at its end of the channel to the trainer. The process is
in a session of its own and ignores the signals that end a job, so it finishes the saves it was
given after its trainer has been killed. Then it ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from lightning_dist.checkpoint.disk.folder import SharedFolder
from lightning_dist.checkpoint.disk.folder_owner import Lock, own_as_writer
from lightning_dist.checkpoint.disk.format import (
    RECORD,
    CheckpointError,
    DroppedCheckpointError,
    archive_nbytes,
)
from lightning_dist.checkpoint.disk.jobs import (
    Committed,
    Done,
    Event,
    Failed,
    Job,
    Link,
    Owned,
    Remove,
    Save,
    SaveFile,
    SaveFolder,
    content_nbytes,
    write_archive,
)
from lightning_dist.checkpoint.disk.scan import verify
from lightning_dist.checkpoint.disk.storage import Storage, storage_of


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
            snapshot: what the ranges of a save lie in.
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
        return archive_nbytes([described, *((p.record, p.nbytes) for p in save.ranges)])
    return content_nbytes(save)


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


_HEARTBEAT = 1.0
_NICE = 5
"""The training goes first."""


class _Service:
    def __init__(self, channel: Connection, *, trainer: int, read_back: bool) -> None:
        self._channel = channel
        self._trainer = trainer
        self._snapshots: dict[int, memoryview] = {}
        self._locks: dict[str, Lock | None] = {}
        self._held: list[int] = []  # locks that the trainer has taken for this process
        self._writer = Writer(report=self._report, read_back=read_back, orphaned=self._orphaned)

    def run(self) -> None:
        while True:
            try:
                # A process that the trainer has forked may hold the other end open after its death.
                while not self._channel.poll(_HEARTBEAT):
                    if self._orphaned():
                        return
                command, *arguments = self._channel.recv()
            except (EOFError, ConnectionResetError):
                return
            getattr(self, f"_{command}")(*arguments)

    def _own(self, folder: str) -> None:
        self._locks[folder] = own_as_writer(folder)
        self._report(Owned(folder))

    def _hold(self) -> None:
        self._held.append(recv_handle(self._channel))

    def _map(self, number: int, nbytes: int) -> None:
        descriptor = recv_handle(self._channel)
        self._snapshots[number] = memoryview(mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ))
        os.close(descriptor)

    def _do(self, job: Job, number: int | None) -> None:
        self._writer.do(job, self._snapshots[number] if number is not None else memoryview(b""))

    def _report(self, event: Event | Owned) -> None:
        if not self._orphaned():
            try:
                self._channel.send(event)
            except (BrokenPipeError, ConnectionResetError):
                return  # nobody listens any more; the file is what counts

    def _orphaned(self) -> bool:
        return os.getppid() != self._trainer


def main(descriptor: int, options: dict[str, Any]) -> None:
    """Serve the trainer at the other end of the socket ``descriptor``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _go_second()
    _Service(Connection(descriptor), **options).run()


def _go_second() -> None:
    os.nice(_NICE)
    # Where Linux shares the processor between sessions first, `nice` counts only within one.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as autogroup:
        autogroup.write(str(_NICE))
