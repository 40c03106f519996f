"""Takes snapshots of a training state and has them written."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_dist.checkpoint.copying import LaterCopy, copy_now
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.folder_owner import Lock, own
from lightning_dist.checkpoint.disk.jobs import (
    Committed,
    Event,
    Failed,
    Job,
    Link,
    Remove,
    Save,
    SaveFile,
    SaveFolder,
)
from lightning_dist.checkpoint.disk.manifest import Origin
from lightning_dist.checkpoint.fence import Fence
from lightning_dist.checkpoint.memory import SnapshotMemory
from lightning_dist.checkpoint.pickling import pickled
from lightning_dist.checkpoint.plan import Owned, Plan, owned_by, plan, shape_of
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.checkpoint.writers import WriterHandle, WriterProcess, WriterThread
from lightning_dist.exchange.handshake import all_facts

log = logging.getLogger(__name__)


@dataclass
class Metrics:
    """What checkpoints have cost the training so far; seconds and bytes of this rank."""

    saves: int = 0
    skipped: int = 0
    failed: int = 0
    stall_s: float = 0.0
    """of the last save: from its call to its return."""
    queue_s: float = 0.0
    """part of it: waiting for an earlier save."""
    fence_s: float = 0.0
    """held back in optimizer steps, in total."""
    write_s: float = 0.0
    """of the last committed save."""
    bytes: int = 0
    """of the last committed save, written by this rank."""
    in_flight: int = 0


class Checkpointer:
    """Saves states asynchronously, on every rank that takes part.

    Methods are for one thread, the training's. Errors of the writer come out of :meth:`poll` and
    :meth:`wait` as events, each once.

    Args:
        settings: see :class:`~lightning_dist.checkpoint.settings.CheckpointSettings`.
        group: a group on CPU of the ranks that write one checkpoint together; None: this rank
            writes alone.
        ranks: world size of the job, for the record.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        *,
        group: dist.ProcessGroup | None = None,
        ranks: int = 1,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.last_committed: Committed | None = None
        self._group = group
        self._ranks = ranks if group is None else group.size()
        self._rank = 0 if group is None else group.rank()
        self._fence = Fence()
        self._optimizers: list[Optimizer] = []
        self._overlap = settings.snapshot in ("auto", "overlap")
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._in_flight: dict[str, tuple[Save, SnapshotMemory | None]] = {}
        self._sent: set[str] = set()
        self._free = [SnapshotMemory() for _ in range(settings.max_in_flight)]
        self._writer: WriterHandle | None = None
        self._folders: dict[str, Lock | None] = {}
        # All jobs pass through one thread, so that they reach the writer in the order of the calls
        # although the copies of some take longer.
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-stager")

    def open(self, folder: str) -> None:
        """Prepare to write to ``folder``; on every rank that writes.

        Raises:
            ValueError: another trainer writes there, or it is no folder.
            OSError: it cannot be written.
        """
        if folder in self._folders:
            return
        self._folders[folder] = own(folder) if self._rank == 0 else None
        if self._writer is None:
            self._writer = self._start_writer(folder)
        else:
            self._writer.own(folder)

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Copy what these optimizers own lazily, and hold their steps back until it is copied."""
        self._optimizers = list(optimizers)
        if self._overlap:
            self._fence.watch(self._optimizers)

    @property
    def busy(self) -> bool:
        """Whether a save would have to wait for an earlier one."""
        with self._changed:
            return len(self._in_flight) >= self.settings.max_in_flight

    def is_pending(self, target: str) -> bool:
        """Whether a save to ``target`` is under way."""
        with self._changed:
            return any(save.target == target for save, _ in self._in_flight.values())

    def save(self, state: Any, target: str, *, step: int, sharded: bool = False) -> None:
        """Save ``state``, anything that ``torch.save`` takes, as ``target``.

        Args:
            state: what to save. It may be changed as soon as this returns, but for parameters and
                states of the watched optimizers, which only those may change.
            target: a path or URL in a folder that was opened.
            step: optimizer steps so far, for the record.
            sharded: a folder, to which every rank of the group adds its part. Collective.
        """
        began = time.perf_counter()
        self._prepare()
        self.metrics.queue_s = time.perf_counter() - began
        content = pickled(state)
        owned = owned_by(self._optimizers)
        origin = self._origin(step)
        if sharded:
            origin, alike = self._agree(origin, shape_of(content, owned))
            owned = owned if alike else {}
        divided = plan(
            content,
            owned=owned,
            overlap=self._overlap and bool(self._optimizers),
            rank=self._rank if sharded else 0,
            ranks=self._ranks if sharded else 1,
        )
        if sharded:
            save: Save = SaveFolder(origin, target, divided.pieces, self._rank, divided.records)
        else:
            save = SaveFile(origin, target, divided.pieces)
        self._take(save, divided, owned)
        self.metrics.stall_s = time.perf_counter() - began
        self.metrics.saves += 1
        if self.settings.snapshot == "sync":
            self.wait()
            self.metrics.stall_s = time.perf_counter() - began

    def save_files(self, files: Sequence[tuple[str, str]], target: str, *, step: int) -> None:
        """Save files of this rank as they are, in a folder that all ranks of the group write to.

        Args:
            files: ``(name in the folder, local path)``; they must not change until it is committed.
            target: a path in a folder that was opened.
            step: for the record.
        """
        self._prepare()
        origin, _ = self._agree(self._origin(step), 0)
        self._begin(SaveFolder(origin, target, (), self._rank, files=tuple(files)), None)
        self.metrics.saves += 1

    def link(self, source: str, target: str, *, symbolic: bool = False) -> None:
        """Show a checkpoint under a second name, after everything asked for so far."""
        self._submit(Link(source, target, symbolic), None)

    def remove(self, target: str) -> None:
        """Remove a checkpoint, after everything asked for so far and never before a success."""
        self._submit(Remove(target), None)

    def poll(self) -> list[Event]:
        """What has become of saves since the last call."""
        with self._changed:
            events, self._events = self._events, []
            self.metrics.in_flight = len(self._in_flight)
        self.metrics.fence_s = self._fence.waited
        return events

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is committed or has failed, and every removal is done.

        Raises:
            CheckpointError: after ``timeout`` seconds.
        """
        self._stager.submit(lambda: None).result(timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._in_flight, timeout):
                targets = ", ".join(save.target for save, _ in self._in_flight.values())
                raise CheckpointError(f"still writing after {timeout} s: {targets}")

    def close(self, timeout: float | None = None) -> None:
        """Wait, end the writer and give folders and memory back."""
        self._fence.unwatch()
        self._stager.shutdown(wait=True)
        try:
            if self._writer is not None:
                self._writer.close(timeout)
        finally:
            self._writer = None
            for lock in self._folders.values():
                if lock is not None:
                    lock.release()
            self._folders = {}
            for memory in self._free:
                memory.release()

    def _take(self, save: Save, divided: Plan, owned: Owned) -> None:
        memory = self._free[-1]
        self._require_memory(divided)
        snapshot = memory.reserve(divided.nbytes)
        for piece, content in divided.constants:
            if content:
                source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                snapshot[piece.offset : piece.offset + piece.nbytes] = source
        copy_now(divided.now, snapshot)
        later = LaterCopy(divided.later, snapshot, owned) if divided.later else None
        self._begin(save, memory, later)

    def _begin(
        self, save: Save, memory: SnapshotMemory | None, later: LaterCopy | None = None
    ) -> None:
        with self._changed:
            self._in_flight[save.origin.save_id] = save, memory
            if memory is not None:
                self._free.remove(memory)
        if later is None or memory is None:
            self._submit(save, memory)
        else:
            self._fence.close()
            self._stager.submit(self._copy_and_send, save, memory, later)

    def _copy_and_send(self, save: Save, memory: SnapshotMemory, later: LaterCopy) -> None:
        try:
            changed = later.run()
        except Exception as error:
            self._report(Failed(save.target, save.origin, f"the snapshot failed: {error!r}"))
            return
        finally:
            self._fence.open()
        if changed:
            self._overlap = False  # from the next save on
            self._report(
                Failed(
                    save.target,
                    save.origin,
                    f"{changed} was changed outside an optimizer step while it was copied, so "
                    "this checkpoint would mix two steps and was dropped; later ones are copied "
                    "at once. Change parameters in the optimizer step only, or set "
                    "snapshot='blocking'",
                )
            )
        else:
            self._send(save, memory)

    def _submit(self, job: Job, memory: SnapshotMemory | None) -> None:
        self._stager.submit(self._send, job, memory)

    def _send(self, job: Job, memory: SnapshotMemory | None) -> None:
        try:
            writer = self._writer
            if writer is None:
                raise CheckpointError("the checkpoint writer has ended")
            if isinstance(job, Save):
                self._sent.add(job.origin.save_id)
            writer.send(job, memory)
        except CheckpointError as error:
            self._report(
                Failed(job.target, job.origin if isinstance(job, Save) else None, str(error))
            )

    def _prepare(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._in_flight) < self.settings.max_in_flight)
        self._fence.wait()  # one copy at a time
        if self._writer is None:  # it has ended, and that was reported
            self._writer = self._start_writer(*self._folders)

    def _require_memory(self, divided: Plan) -> None:
        limit, needed = self.settings.host_memory_limit, divided.nbytes * len(self._free)
        if limit is not None and needed > limit:
            raise ValueError(
                f"host_memory_limit={limit} bytes is less than the {needed} that snapshots of this "
                "state take; raise it, lower max_in_flight, or use format='sharded' on more ranks"
            )

    def _origin(self, step: int) -> Origin:
        return Origin(os.urandom(8).hex(), step, time.time_ns(), self._ranks)

    def _agree(self, origin: Origin, shape: int) -> tuple[Origin, bool]:
        """Rank 0's origin, and whether all ranks divide the state alike. Collective."""
        if self._group is None:
            return origin, True
        mine = {"save_id": origin.save_id, "created_ns": origin.created_ns, "shape": shape}
        facts = all_facts(mine, group=self._group, device=torch.device("cpu"))
        first = facts[0]
        alike = all(of_rank["shape"] == first["shape"] for of_rank in facts)
        agreed = replace(origin, save_id=first["save_id"], created_ns=first["created_ns"])
        return agreed, alike

    def _report(self, event: Event) -> None:
        with self._changed:
            if event.origin is not None:
                if event.origin.save_id not in self._in_flight:
                    return  # reported already, when its writer ended
                _, memory = self._in_flight.pop(event.origin.save_id)
                self._sent.discard(event.origin.save_id)
                if memory is not None:
                    self._free.append(memory)
            if isinstance(event, Committed):
                self.last_committed = event
                self.metrics.write_s, self.metrics.bytes = event.seconds, event.nbytes
            else:
                self.metrics.failed += 1
            self._events.append(event)
            self._changed.notify_all()

    def _lost(self, reason: str) -> None:
        """The writer has ended by itself, and all saves that it had with it."""
        with self._changed:
            saves = [self._in_flight[save_id][0] for save_id in self._sent]
            self._writer = None
        for save in saves:
            self._report(Failed(save.target, save.origin, reason))

    def _start_writer(self, *folders: str) -> WriterHandle:
        read_back = self.settings.verify == "always"
        kind = self.settings.writer
        here = [folder for folder in folders if _only_here(folder)]
        if kind == "process" and here:
            raise ValueError(
                f"writer='process' cannot write to {here[0]}, which is in the memory of this "
                "process; use writer='thread'"
            )
        if kind == "thread" or here:
            return WriterThread(report=self._report, read_back=read_back)
        writer = WriterProcess(report=self._report, lost=self._lost, read_back=read_back)
        for folder in folders:
            writer.own(folder)
        return writer


def _only_here(folder: str) -> bool:
    return folder.startswith("memory:") or not hasattr(os, "memfd_create")
