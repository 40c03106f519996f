"""Jobs on their way to the writer, and what came back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.jobs import (
    Committed,
    Done,
    Event,
    Failed,
    Job,
    Link,
    Remove,
    Save,
    SaveFolder,
)
from lightning_dist.checkpoint.disk.writing import staged_nbytes
from lightning_dist.checkpoint.memory import SnapshotMemory
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.checkpoint.writers import WriterHandle, WriterProcess, WriterThread


@dataclass(frozen=True)
class _InFlight:
    save: Save
    memory: SnapshotMemory | None


class Delivery:
    """Hands jobs to a writer in the order of the calls, and keeps count of them.

    All jobs pass through one thread, because a snapshot may have to be completed first: the thread
    calls ``prepare`` and then sends. Events come back on another thread.

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
        self._sent: set[str] = set()  # and of those, what the writer has
        self._errands = 0  # links and removals under way
        self._removals: dict[str, bool] = {}  # asked for; whether a success will do them
        self._again: list[str] = []  # of those, what an ended writer may not have done
        self._failing = False  # since the last success
        self._events: list[Committed | Failed] = []
        self._free = [SnapshotMemory() for _ in range(settings.max_in_flight)]
        self._folders: list[str] = []
        self._writer: WriterHandle | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-delivery")

    @property
    def writer(self) -> WriterHandle | None:
        return self._writer

    @property
    def count(self) -> int:
        """Saves under way."""
        with self._changed:
            return len(self._in_flight)

    def is_pending(self, target: str) -> bool:
        with self._changed:
            return any(each.save.target == target for each in self._in_flight.values())

    def open(self, folder: str) -> None:
        """Have a writer that may write to ``folder``."""
        if _only_here(folder) and isinstance(self._writer, WriterProcess):
            raise ValueError(
                f"one writer writes either to files or to memory, and has been given files before "
                f"{folder}; use writer='thread'"
            )
        self._folders.append(folder)
        if self._writer is None:
            self._writer = self._start_writer()
        else:
            self._writer.own(folder)

    def await_slot(self) -> None:
        """Wait until one more save may be under way, and a writer is there to do it."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._in_flight) < self._settings.max_in_flight)
        if self._writer is None:  # it has ended, and that was reported
            with self._changed:
                self._failing, self._again = True, list(self._removals)
            self._writer = self._start_writer()

    def memory(self) -> SnapshotMemory:
        """Memory for the next save; it is in use from :meth:`send` until the save has ended."""
        return self._free[-1]

    def send(
        self,
        save: Save,
        memory: SnapshotMemory | None = None,
        *,
        prepare: Callable[[], str] = lambda: "",
    ) -> None:
        """Have ``save`` done.

        Args:
            memory: where its pieces lie.
            prepare: called before, on the thread of this object; returns why the save has to be
                dropped, or an empty string.
        """
        with self._changed:
            self._in_flight[save.origin.save_id] = _InFlight(save, memory)
            self._removals.pop(save.target, None)
            again, self._again = [path for path in self._again if path != save.target], []
            if memory is not None:
                self._free.remove(memory)
        self._thread.submit(self._prepare_and_put, save, memory, prepare)
        for path in again:
            self.run_errand(Remove(path))

    def run_errand(self, errand: Link | Remove) -> None:
        """Have a link made or a checkpoint removed, after everything that was sent before."""
        with self._changed:
            self._errands += 1
            if isinstance(errand, Remove):
                self._removals[errand.target] = False
        # Not to a writer that is started later: the save before it was lost with this one.
        self._thread.submit(self._put, errand, None, self._writer)

    def poll(self) -> list[Committed | Failed]:
        """What became of saves since the last call, and which errands failed."""
        with self._changed:
            events, self._events = self._events, []
            return events

    def progress(self) -> tuple[int, int]:
        """Bytes of the saves under way that are in files already, and all of them."""
        with self._changed:
            saves = [each.save for each in self._in_flight.values()]
        total = sum(piece.nbytes for save in saves for piece in save.pieces)
        return min(sum(map(staged_nbytes, saves)), total), total

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is under way; TimeoutError after ``timeout`` seconds."""
        with self._changed:
            idle = self._changed.wait_for(
                lambda: not self._in_flight and not self._errands, timeout
            )
            if not idle:
                targets = ", ".join(each.save.target for each in self._in_flight.values())
                raise TimeoutError(f"still writing after {timeout} s: {targets}")

    def close(self, timeout: float | None = None) -> None:
        """Let everything be done, end the writer, give the memory back."""
        self._thread.shutdown(wait=True)
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close(timeout)
        finally:
            for memory in self._free:
                memory.release()

    def _prepare_and_put(
        self, save: Save, memory: SnapshotMemory | None, prepare: Callable[[], str]
    ) -> None:
        try:
            problem = prepare()
        except Exception as error:
            problem = f"the snapshot failed: {error!r}"
        if problem and isinstance(save, SaveFolder):  # other ranks wait for this one's part
            save = replace(save, pieces=(), files=(), dropped=problem)
        elif problem:
            self._report(Failed(save.target, save.origin, problem, dropped=True))
            return
        self._put(save, memory, self._writer)

    def _put(self, job: Job, memory: SnapshotMemory | None, writer: WriterHandle | None) -> None:
        origin = job.origin if isinstance(job, Save) else None
        try:
            if writer is None:
                raise CheckpointError("the checkpoint writer has ended")
            if origin is not None:
                self._sent.add(origin.save_id)
            writer.send(job, memory)
        except CheckpointError as error:
            if self._writer is writer:  # it ended before it was ours
                self._writer = None
            if isinstance(job, Remove):  # asked for again with the next save
                self._end_errand()
            elif isinstance(job, Link) and (self._failing or self.is_pending(job.source)):
                self._end_errand()  # what it would show is lost too, and that is said
            else:
                self._report(Failed(job.target, origin, str(error)))

    def _report(self, event: Event) -> None:
        with self._changed:
            if isinstance(event, Done) and event.target in self._removals:
                self._removals[event.target] = True
            if isinstance(event, Committed) or not self._failing:
                self._removals = {path: d for path, d in self._removals.items() if not d}
            if isinstance(event, Done) or event.origin is None:
                self._end_errand()
            elif event.origin.save_id not in self._in_flight:
                return  # reported already, when its writer ended
            else:
                memory = self._in_flight.pop(event.origin.save_id).memory
                self._sent.discard(event.origin.save_id)
                if memory is not None:
                    self._free.append(memory)
            if isinstance(event, Committed):
                self._failing = False
                self._on_committed(event)
            elif isinstance(event, Failed):
                self._failing |= event.origin is not None
                self._on_failed(event)
            if not isinstance(event, Done):
                self._events.append(event)
            self._changed.notify_all()

    def _end_errand(self) -> None:
        with self._changed:
            self._errands = max(self._errands - 1, 0)  # 0 since a writer was lost
            self._changed.notify_all()

    def _lost(self, reason: str) -> None:
        """The writer has ended by itself, and all that it had with it."""
        with self._changed:
            saves = [self._in_flight[save_id].save for save_id in self._sent]
            self._writer, self._errands = None, 0
            self._changed.notify_all()
        for save in saves:
            self._report(Failed(save.target, save.origin, reason))

    def _start_writer(self) -> WriterHandle:
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
        for folder in self._folders:
            writer.own(folder)
        return writer


def _only_here(folder: str) -> bool:
    return folder.startswith("memory:") or not hasattr(os, "memfd_create")
