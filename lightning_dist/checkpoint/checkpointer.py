"""Snapshots of a training state, their way to the writer, and what they cost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_dist.base.features import CHECKPOINTS
from lightning_dist.checkpoint.disk.folder_owner import Lock, forget, is_owned, own
from lightning_dist.checkpoint.disk.format import CheckpointError, Origin
from lightning_dist.checkpoint.disk.jobs import (
    Committed,
    Failed,
    Keep,
    Link,
    Remove,
    SaveFile,
    SaveFolder,
)
from lightning_dist.checkpoint.disk.scan import Orders
from lightning_dist.checkpoint.reading import require_loadable
from lightning_dist.checkpoint.snapshot.plan import Pickled, pickled, plan, shape_of
from lightning_dist.checkpoint.snapshot.snapshot import Snapshots
from lightning_dist.checkpoint.writer_queue import WriterQueue
from lightning_dist.ranks.agreement import Ranks
from lightning_dist.ranks.facts import Spread
from lightning_dist.settings.run import CheckpointSettings


@dataclass
class Metrics:
    """Cost of checkpoints so far, on this rank. Loggers get the fields as ``checkpoint/<name>``."""

    saves: int = 0
    skipped: int = 0
    failed: int = 0
    in_flight: int = 0
    blocking_ms: float = 0.0
    """Time of the last save, from its call to its return."""
    queue_ms: float = 0.0
    """Part of it: waiting for an earlier save."""
    optimizer_wait_ms: float = 0.0
    """Waiting for copies in optimizer steps, in total."""
    write_ms: float = 0.0
    """Time that the writer took for the last committed save."""
    bytes: int = 0
    """Bytes that this rank has written of the last committed save."""

    def by_name(self) -> dict[str, float]:
        """``checkpoint/*`` for loggers, without values that are not known yet."""
        unknown = {"saves"}
        if not self.saves:
            unknown |= {"blocking_ms", "queue_ms", "optimizer_wait_ms"}
        if not self.bytes:
            unknown |= {"write_ms", "bytes"}
        return {f"checkpoint/{n}": value for n, value in asdict(self).items() if n not in unknown}


class Checkpointer:
    """Saves states asynchronously, on every rank that takes part.

    Methods are for one thread, the training's. Errors of the writer come out of :meth:`poll` as
    events, each once.

    Args:
        settings: see :class:`~lightning_dist.settings.run.CheckpointSettings`.
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
        CHECKPOINTS.require()
        self.settings = settings
        self._metrics = Metrics()
        self.last_committed: Committed | None = None
        self._together = Ranks(group)
        self.ranks = ranks if group is None else self._together.count
        """World size of the job, for the record."""
        self.run = ""
        """Name of the run that saves, for the record."""
        self.proves_loadable = False
        """Whether the first save is refused if ``weights_only=True`` could not read it."""
        self.patience = 0.0
        """Seconds that :meth:`open` waits for a trainer whose place this process takes."""
        self._orders = Orders()
        self._locks: dict[str, Lock | None] = {}
        self._alone = True
        self._queue = WriterQueue(settings, failed=self._on_failed, committed=self._on_committed)
        self._snapshots = Snapshots(settings, self._queue)

    @property
    def metrics(self) -> Metrics:
        """Cost of saves so far."""
        self._metrics.in_flight = self._queue.count
        self._metrics.optimizer_wait_ms = self._snapshots.fence.waited * 1e3
        return self._metrics

    def open(self, folder: str, *, alone: bool = True) -> None:
        """Prepare to write to ``folder``; on every rank that writes, once rank 0's call is over.

        Args:
            alone: keep other trainers from it, and remove what dead ones left half done. Otherwise
                what this one leaves half done is never removed.

        Raises:
            ValueError: another trainer writes there, or it is no folder.
            OSError: it cannot be written.
        """
        self._alone &= alone and self.settings.lock
        if folder not in self._locks:
            takes = alone and self.is_first
            # The writer of a rank that comes before would keep rank 0 out.
            assert takes or not alone or is_owned(folder), f"rank 0 has not opened {folder}"
            lock = self.settings.lock
            self._locks[folder] = (
                own(folder, lock=lock, trainer_patience=self.patience) if takes else None
            )
            self._queue.open(folder, alone=alone and self.settings.lock)
            if self.is_first:
                self._orders.begin_after(folder)

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Copy what these optimizers own lazily, and hold their steps back until it is copied."""
        self._snapshots.watch(optimizers)

    @property
    def is_first(self) -> bool:
        """Whether this rank publishes, links and removes."""
        return self._together.rank == 0

    @property
    def busy(self) -> bool:
        """Whether a save would have to wait for an earlier one."""
        return self._queue.count >= self.settings.max_in_flight

    def is_pending(self, target: str) -> bool:
        """Whether a save to ``target`` is under way."""
        return self._queue.is_pending(target)

    def is_removing(self, target: str) -> bool:
        """Whether a removal of ``target`` was asked for and is not known to be done."""
        return self._queue.is_removing(target)

    def save(
        self,
        state: Any,
        target: str,
        *,
        step: int,
        sharded: bool = False,
        spreads: Sequence[Spread] = (),
        resumable: bool = True,
    ) -> None:
        """Save ``state``, anything that ``torch.save`` takes, as ``target``.

        Args:
            state: what to save. It may be changed as soon as this returns, but for parameters and
                states of the watched optimizers, which only those may change.
            target: a path or URL in a folder that was opened.
            step: optimizer steps so far, for the record.
            sharded: a folder, to which every rank of the group adds its part. Collective.
            spreads: tensors in the state of which each rank has a part; for sharded saves.
            resumable: whether a training can go on from it, for the record.

        Raises:
            ValueError: the state takes more than ``host_memory_limit``, or cannot be saved (in a
                sharded save: on any rank).
            CheckpointError: an earlier save is stuck (in a sharded save: on any rank).
        """
        began = time.perf_counter()
        late = self._prepare(together=sharded)
        self._metrics.queue_ms = (time.perf_counter() - began) * 1e3
        origin = self._origin(step, target, resumable=resumable)
        by_address = {spread.whole.untyped_storage().data_ptr(): spread for spread in spreads}
        by_address.pop(0, None)  # of empty tensors
        if sharded:
            self._save_part(state, origin, target, spreads=by_address, problem=late)
        else:
            content, owned = self._pickled(state), self._snapshots.owned()
            divided = plan(content, owned=owned, overlap=self._snapshots.overlap)
            self._snapshots.take(SaveFile(origin, target, divided.ranges), divided, owned)
        if self.settings.snapshot == "sync":
            self.wait()
        self._metrics.blocking_ms = (time.perf_counter() - began) * 1e3
        self._metrics.saves += 1

    def _save_part(
        self,
        state: Any,
        origin: Origin,
        target: str,
        *,
        spreads: Mapping[int, Spread],
        problem: Exception | None,
    ) -> None:
        """This rank's part of a sharded save. Collective."""
        content, shape = Pickled(b"", ()), 0
        owned = self._snapshots.owned()
        if problem is None:
            try:
                content = self._pickled(state)
                shape = shape_of(content, owned, spreads)
            except Exception as error:  # the others must know before they wait for this rank
                problem = error
        origin, alike = self._agree(origin, shape=shape, problem=problem)
        owned = owned if alike else {}
        divided = plan(
            content,
            owned=owned,
            overlap=self._snapshots.overlap,
            spreads=spreads,
            rank=self._together.rank,
            ranks=self.ranks,
        )
        save = SaveFolder(
            origin,
            target,
            divided.ranges,
            self._together.rank,
            divided.records,
            tuple(divided.spread.items()),
            tuple(divided.complete.items()),
        )
        try:
            self._snapshots.take(save, divided, owned)
        except Exception as error:
            self._queue.send(replace(save, ranges=(), dropped=str(error)))
            raise

    def _agree(
        self, origin: Origin, *, shape: int = 0, problem: Exception | None
    ) -> tuple[Origin, bool]:
        """Rank 0's ``origin`` of a checkpoint that all write, and whether all have this ``shape``.

        Args:
            problem: why this rank cannot take part; all ranks raise it, as a CheckpointError if it
                is one, or else as a ValueError.
        """
        ranks = self._together
        if ranks.count < origin.ranks:
            raise ValueError(
                f"{origin.ranks} ranks write one folder together, so they need a group on CPU, got "
                "group=None; give dist.new_group(backend='gloo')"
            )
        error: Exception | None = None
        if problem is not None:
            kind = CheckpointError if isinstance(problem, CheckpointError) else ValueError
            text = f"{type(problem).__name__}: {problem}"
            error = kind(f"rank {ranks.rank} cannot save its state: {text}")
            error.__cause__ = problem
        mine = {"save_id": origin.save_id, "created_ns": origin.created_ns, "order": origin.order}
        by_rank = ranks.all({"origin": mine, "shape": shape}, error=error)
        alike = all(facts["shape"] == by_rank[0]["shape"] for facts in by_rank)
        return replace(origin, **by_rank[0]["origin"]), alike

    def _pickled(self, state: Any) -> Pickled:
        content = pickled(state)
        if self.proves_loadable:
            require_loadable(state, content, name="checkpoint")
            self.proves_loadable = False
        return content

    def wait_for_turn(self) -> None:
        """Wait until a save would not have to wait for an earlier one."""
        self._queue.await_slot()

    def wait_for_copy(self) -> None:
        """Wait until the last save has copied all that it saves: anybody may change it now."""
        self._snapshots.fence.wait()

    def save_files(
        self, files: Sequence[tuple[str, str]], target: str, *, step: int, scratch: str = ""
    ) -> str:
        """Save files of this rank as they are, in a folder that all ranks of the group write to.

        Args:
            files: ``(name in the folder, local path)``; they must not change until it is committed.
            target: a path in a folder that was opened.
            step: for the record.
            scratch: a local folder with the files, which the writer removes whatever happens.

        Returns:
            ``origin.save_id`` of the event that will say what became of it.
        """
        late = self._prepare(together=True)
        origin, _ = self._agree(self._origin(step, target), problem=late)
        self._queue.send(
            SaveFolder(origin, target, (), self._together.rank, files=tuple(files), scratch=scratch)
        )
        self._metrics.saves += 1
        return origin.save_id

    def link(self, source: str, target: str, *, symbolic: bool = False) -> None:
        """Show a checkpoint under a second name, after everything asked for so far."""
        self._queue.run(Link(source, target, symbolic))

    def remove(self, target: str) -> None:
        """Remove a checkpoint, after everything asked for so far and never before a success."""
        self._queue.run(Remove(target))

    def keep(self, target: str) -> None:
        """Take back a :meth:`remove` that still waits for a success."""
        self._queue.run(Keep(target))

    def poll(self) -> list[Committed | Failed]:
        """Outcomes of saves since the last call, and file operations that failed."""
        return self._queue.poll()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is committed or has failed, and every link and removal is done.

        Raises:
            TimeoutError: after ``timeout`` seconds.
        """
        self._queue.wait(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Wait, end the writer, and release folders and memory."""
        self._snapshots.fence.unwatch()
        try:
            self._queue.close(timeout)
        finally:
            for folder, lock in self._locks.items():
                if lock is not None:
                    lock.release()
                elif self._alone:  # the last of the ranks to end removes the lock file
                    with suppress(OSError):
                        forget(folder)
            self._locks = {}

    def _prepare(self, *, together: bool) -> Exception | None:
        """Wait for earlier saves; where ranks save ``together``, why that failed is for all."""
        try:
            self._queue.await_slot()
            self._snapshots.fence.wait()  # one copy at a time
        except Exception as error:
            if not together or self._together.group is None:
                raise
            return error
        return None

    def _origin(self, step: int, target: str, *, resumable: bool = True) -> Origin:
        save_id = os.urandom(8).hex()
        if not self._alone:  # a name that the owner of the folder does not clear away
            save_id = f"m{save_id}"
        return Origin(
            save_id,
            step,
            time.time_ns(),
            self.ranks,
            resumable,
            order=self._orders.next(),
            name=target.rstrip("/").rsplit("/", 1)[-1],
            run=self.run,
        )

    def _on_committed(self, event: Committed) -> None:
        self.last_committed = event
        self._metrics.write_ms, self._metrics.bytes = event.seconds * 1e3, event.nbytes

    def _on_failed(self, event: Failed) -> None:
        self._metrics.failed += 1
