"""Queue of the jobs of a writer, and of what came back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace

from lightning_dist.checkpoint.disk.folder import SLOWEST_UPLOAD
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.jobs import (
    Committed,
    Done,
    Event,
    Failed,
    Job,
    Keep,
    Link,
    Remove,
    Save,
    content_nbytes,
)
from lightning_dist.checkpoint.writers import AnyWriter, SnapshotMemory, WriterProcess, WriterThread
from lightning_dist.settings.run import CheckpointSettings

FileOperation = Link | Remove | Keep

_NOTHING = Keep("")
_FAREWELL = 1.0
"""Seconds for the writer to be sent what was given up."""
_PATIENCE = 600.0
"""Seconds for which a save may wait for an earlier one, beyond what a slow upload takes."""


@dataclass
class _InFlight:
    save: Save
    memory: SnapshotMemory | None
    nbytes: int
    """counted before it is sent: the writer removes files that it has copied."""
    copied: Future[str]
    """when it is prepared: why it has to be dropped, or an empty string."""
    writer: AnyWriter | None = None
    """that has it; None until it is sent."""


class Removals:
    """Removals that were requested, until they are known to be done.

    After a failed save a writer lets removals wait for the next success. If it is lost they are
    asked for again, after the next save.
    """

    def __init__(self) -> None:
        self._asked: dict[str, bool] = {}  # whether it waits in the writer
        self._again: list[str] = []

    def ask(self, path: str) -> None:
        self._asked[path] = False

    def __contains__(self, path: str) -> bool:
        return path in self._asked or path in self._again

    def cancel(self, path: str) -> None:
        """``path`` is to stay, or is written anew."""
        self._asked.pop(path, None)
        self._again = [again for again in self._again if again != path]

    def answered(self, path: str, *, waits: bool) -> None:
        """The writer has done it, or will after the next success."""
        if path in self._asked:
            self._asked[path] = True
            if not waits:
                del self._asked[path]

    def succeeded(self) -> None:
        """A save was committed, so what waited is done."""
        self._asked = {path: waits for path, waits in self._asked.items() if not waits}

    def lost(self) -> None:
        """The writer is gone."""
        self._again = list(self._asked)

    def take_again(self) -> list[str]:
        """Removals to be requested again."""
        again, self._again = self._again, []
        return again


class WriterQueue:
    """Hands jobs to a writer in the order of the calls, and keeps count of them.

    All jobs pass through one thread, because a snapshot may have to be completed first: the thread
    waits for ``prepare``, which has a thread of its own, and then sends. The process does not end
    before, unless :meth:`close` has given up. Events come back on another thread.

    Args:
        settings: for the number of saves in flight and the kind of writer.
        failed: called with every failure, on some thread.
        committed: called with every success, on some thread.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        *,
        failed: Callable[[Failed], None],
        committed: Callable[[Committed], None],
    ) -> None:
        self._settings = settings
        self._on_failed, self._on_committed = failed, committed
        self._changed = threading.Condition()
        self._in_flight: dict[str, _InFlight] = {}
        # Under way, and with whom.
        self._operations: list[tuple[FileOperation, AnyWriter | None]] = []
        self._removals = Removals()
        self._newest = ""  # target of the last success
        self._closing = False
        self._patience = _PATIENCE
        self._events: list[Committed | Failed] = []
        self._free = [SnapshotMemory() for _ in range(settings.max_in_flight)]
        self._folders: dict[str, bool] = {}  # whether others are kept out
        self.writer: AnyWriter | None = None
        self._loss = "the checkpoint writer has ended"  # or how
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-queue")

    @property
    def count(self) -> int:
        """Saves under way."""
        with self._changed:
            return len(self._in_flight)

    def is_pending(self, target: str) -> bool:
        """Whether it is being saved, or linked to."""
        with self._changed:
            saves = (flight.save.target == target for flight in self._in_flight.values())
            links = (isinstance(e, Link) and e.target == target for e, _ in self._operations)
            return any(saves) or any(links)

    def is_removing(self, target: str) -> bool:
        """Whether its removal was requested and is not known to be done."""
        with self._changed:
            return target in self._removals

    def open(self, folder: str, *, alone: bool = True) -> None:
        """Start a writer for ``folder``, which keeps other trainers out if it is ``alone``."""
        if _only_here(folder) and isinstance(self.writer, WriterProcess):
            raise ValueError(
                "One writer writes either to files or to memory, and has been given files before "
                f"{folder}; use writer='thread'"
            )
        self._folders[folder] = alone
        if self.writer is None:
            self.writer = self._start_writer()
        elif alone:
            self.writer.own(folder)

    def await_slot(self) -> None:
        """Wait until one more save may be under way, and a writer is there to do it.

        Raises:
            CheckpointError: an earlier save takes longer than any disk that works.
        """
        with self._changed:
            # Looking at the files for progress would hang where the file system does.
            nbytes = sum(flight.nbytes for flight in self._in_flight.values())
            limit = self._patience + nbytes / SLOWEST_UPLOAD
            if not self._changed.wait_for(
                lambda: len(self._in_flight) < self._settings.max_in_flight, limit
            ):
                raise CheckpointError(
                    f"{self._targets()} is still being written after {limit:.1f} s, so no other "
                    "checkpoint can be taken; is the file system responding, or the writer stopped?"
                )
        if self.writer is None:  # it has ended, and that was reported
            with self._changed:
                self._removals.lost()
            self.writer = self._start_writer()

    def memory(self) -> SnapshotMemory:
        """Memory for the next save; it is in use from :meth:`send` until the save has ended."""
        return self._free[-1]

    def send(
        self,
        save: Save,
        memory: SnapshotMemory | None = None,
        *,
        prepare: Callable[[], str] | None = None,
    ) -> None:
        """Send ``save`` to the writer.

        Args:
            memory: where its ranges lie.
            prepare: called before, on another thread; returns why the save has to be dropped, or
                an empty string.
        """
        nbytes, copied = content_nbytes(save), Future[str]()
        with self._changed:
            self._in_flight[save.origin.save_id] = _InFlight(save, memory, nbytes, copied)
            self._removals.cancel(save.target)
            again = self._removals.take_again()
            if memory is not None:
                self._free.remove(memory)
        if prepare is None:
            copied.set_result("")
        else:  # a thread that is stuck must not keep the process from ending
            name, arguments = "checkpoint-copy", (prepare, copied)
            threading.Thread(target=_prepare, args=arguments, name=name, daemon=True).start()
        self._thread.submit(self._put_prepared, save, memory, copied)
        for path in again:
            self.run(Remove(path))

    def run(self, operation: FileOperation) -> None:
        """Send an operation, which is done after everything that was sent before."""
        with self._changed:
            writer = self.writer
            self._operations.append((operation, writer))
            if isinstance(operation, Remove):
                self._removals.ask(operation.target)
            else:
                self._removals.cancel(operation.target)
        # Not to a writer that is started later: the save before it was lost with this one.
        self._thread.submit(self._put, operation, None, writer)

    def poll(self) -> list[Committed | Failed]:
        """Outcomes of saves since the last call, and file operations that failed."""
        with self._changed:
            events, self._events = self._events, []
            return events

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is under way; TimeoutError after ``timeout`` seconds."""
        with self._changed:
            idle = self._changed.wait_for(
                lambda: not self._in_flight and not self._operations, timeout
            )
            if not idle:
                raise TimeoutError(f"Still writing after {timeout} s: {self._targets()}")

    def close(self, timeout: float | None = None) -> None:
        """Wait until all jobs are done, end the writer and release the memory.

        Raises:
            CheckpointError: not all of it was done within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            is_first, self._closing = not self._closing, True
        last = [self._thread.submit(int)] if is_first else []
        self._thread.shutdown(wait=False)
        stuck = bool(wait(last, timeout).not_done)
        targets = self._targets()
        if stuck:
            self._give_copies_up()
            wait(last, _FAREWELL)  # so that the writer and the other ranks learn of it
        writer, self.writer = self.writer, None
        try:
            if writer is not None:
                writer.close(None if deadline is None else max(deadline - time.monotonic(), 1.0))
        except CheckpointError:
            if not stuck:  # what is lost is worse
                raise
        finally:
            for memory in self._free:
                memory.release()
        if stuck:
            raise CheckpointError(
                f"{targets} is still being copied after {timeout:g} s, and was dropped"
            )

    def _targets(self) -> str:
        return ", ".join(flight.save.target for flight in self._in_flight.values())

    def _give_copies_up(self) -> None:
        with self._changed:
            for flight in self._in_flight.values():
                with suppress(InvalidStateError):  # copied
                    flight.copied.set_result("its copy was not complete at close()")
                    flight.memory = None  # not released: the copy may go on

    def _put_prepared(self, save: Save, memory: SnapshotMemory | None, copied: Future[str]) -> None:
        if problem := copied.result():  # the writer and the other ranks have to know
            save = replace(save, ranges=(), dropped=problem)
        self._put(save, memory, self.writer)

    def _put(self, job: Job, memory: SnapshotMemory | None, writer: AnyWriter | None) -> None:
        origin = job.origin if isinstance(job, Save) else None
        try:
            if writer is None:
                raise CheckpointError(self._loss)
            if origin is not None:
                with self._changed:
                    self._in_flight[origin.save_id].writer = writer
            writer.send(job, memory)
        except CheckpointError as error:
            with self._changed:
                if self.writer is writer:  # it ended before it was ours
                    self.writer, self._loss = None, str(error)
            if isinstance(job, Save) or self._is_missing(job):
                self._report(writer, Failed(job.target, origin, str(error)))
            else:
                self._end(job.target, writer)

    def _report(self, writer: AnyWriter | None, event: Event) -> None:
        with self._changed:
            if isinstance(event, Done):
                self._removals.answered(event.target, waits=event.waits)
                self._end(event.target, writer)
            elif event.origin is None:
                self._end(event.target, writer)
            elif event.origin.save_id not in self._in_flight:
                return  # reported already, when its writer ended
            else:
                memory = self._in_flight.pop(event.origin.save_id).memory
                if memory is not None:
                    self._free.append(memory)
            if isinstance(event, Committed):
                self._removals.succeeded()
                self._newest = event.target
                self._on_committed(event)
                if not self._closing:
                    self.run(_NOTHING)  # its end says that the writer has removed as well
            elif isinstance(event, Failed):
                self._on_failed(event)
            if not isinstance(event, Done):
                self._events.append(event)
            self._changed.notify_all()

    def _end(self, target: str, writer: AnyWriter | None) -> None:
        """Remove one operation on ``target`` of ``writer``; another writer may have one too."""
        with self._changed:
            of_writer = (operation for operation in self._operations if operation[1] is writer)
            ended = next(
                (operation for operation in of_writer if operation[0].target == target), None
            )
            if ended is not None:  # not lost with its writer
                self._operations.remove(ended)
            self._changed.notify_all()

    def _lost(self, writer: AnyWriter, reason: str) -> None:
        """``writer`` has ended by itself, so all of its jobs are lost."""
        with self._changed:
            lost = [flight.save for flight in self._in_flight.values() if flight.writer is writer]
            links = [e for e, with_ in self._operations if with_ is writer and self._is_missing(e)]
            self._operations = [
                operation for operation in self._operations if operation[1] is not writer
            ]
            if self.writer is writer:
                self.writer, self._loss = None, reason
            self._changed.notify_all()
        for save in lost:
            self._report(writer, Failed(save.target, save.origin, reason))
        for link in links:
            self._report(writer, Failed(link.target, None, reason))

    def _is_missing(self, operation: FileOperation) -> bool:
        """True if something is missing because ``operation`` was lost with its writer.

        Removals are asked for again, and a link to what was lost too has been reported with it.
        """
        return isinstance(operation, Link) and operation.source == self._newest

    def _start_writer(self) -> AnyWriter:
        read_back = self._settings.verify == "always"
        kind = self._settings.writer
        here = [folder for folder in self._folders if _only_here(folder)]
        if kind == "process" and here:
            raise ValueError(
                f"writer='process' cannot write to {here[0]}, which is in the memory of this "
                "process; use writer='thread'"
            )
        if kind == "thread" or here:
            return WriterThread(report=self._report, read_back=read_back)
        writer = WriterProcess(report=self._report, lost=self._lost, read_back=read_back)
        for folder, alone in self._folders.items():
            if alone:
                writer.own(folder)
        return writer


def _prepare(prepare: Callable[[], str], copied: Future[str]) -> None:
    try:
        problem = prepare()
    except Exception as error:
        problem = f"the snapshot failed: {error!r}"
    with suppress(InvalidStateError):  # given up
        copied.set_result(problem)


def _only_here(folder: str) -> bool:
    return folder.startswith("memory:") or not hasattr(os, "memfd_create")
