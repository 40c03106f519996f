"""Takes snapshots of a training state and has them written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.checkpoint.copying import LaterCopy, copy_now
from lightning_dist.checkpoint.delivery import Delivery
from lightning_dist.checkpoint.disk.folder_owner import Lock, own
from lightning_dist.checkpoint.disk.jobs import (
    Committed,
    Failed,
    Link,
    Remove,
    Save,
    SaveFile,
    SaveFolder,
)
from lightning_dist.checkpoint.disk.manifest import Origin
from lightning_dist.checkpoint.fence import Fence
from lightning_dist.checkpoint.pickling import pickled
from lightning_dist.checkpoint.plan import Owned, Plan, Striped, owned_by, plan, shape_of
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.exchange.handshake import all_facts


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

    Methods are for one thread, the training's. Errors of the writer come out of :meth:`poll` as
    events, each once.

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
        self._locks: dict[str, Lock | None] = {}
        self._delivery = Delivery(settings, failed=self._on_failed, committed=self._on_committed)

    def open(self, folder: str, *, alone: bool = True) -> None:
        """Prepare to write to ``folder``; on every rank that writes.

        Args:
            alone: keep other trainers from it, and remove what dead ones left half done.

        Raises:
            ValueError: another trainer writes there, or it is no folder.
            OSError: it cannot be written.
        """
        if folder not in self._locks:
            self._locks[folder] = own(folder) if alone and self.is_first else None
            self._delivery.open(folder)

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Copy what these optimizers own lazily, and hold their steps back until it is copied."""
        self._optimizers = list(optimizers)
        if self._overlap:
            self._fence.watch(self._optimizers)

    @property
    def is_first(self) -> bool:
        """Whether this rank publishes, links and removes."""
        return self._rank == 0

    @property
    def busy(self) -> bool:
        """Whether a save would have to wait for an earlier one."""
        return self._delivery.count >= self.settings.max_in_flight

    def is_pending(self, target: str) -> bool:
        """Whether a save to ``target`` is under way."""
        return self._delivery.is_pending(target)

    def save(
        self,
        state: Any,
        target: str,
        *,
        step: int,
        sharded: bool = False,
        striped: Sequence[Striped] = (),
    ) -> None:
        """Save ``state``, anything that ``torch.save`` takes, as ``target``.

        Args:
            state: what to save. It may be changed as soon as this returns, but for parameters and
                states of the watched optimizers, which only those may change.
            target: a path or URL in a folder that was opened.
            step: optimizer steps so far, for the record.
            sharded: a folder, to which every rank of the group adds its part. Collective.
            striped: tensors in the state of which each rank has a part; for sharded saves.

        Raises:
            ValueError: the state takes more than ``host_memory_limit``, or cannot be saved.
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
            striped={each.whole.untyped_storage().data_ptr(): each for each in striped},
            rank=self._rank if sharded else 0,
            ranks=self._ranks if sharded else 1,
        )
        save: Save = SaveFile(origin, target, divided.pieces)
        if sharded:
            records, gaps = divided.records, tuple(divided.striped.items())
            save = SaveFolder(origin, target, divided.pieces, self._rank, records, gaps)
        self._take(save, divided, owned)
        if self.settings.snapshot == "sync":
            self.wait()
        self.metrics.stall_s = time.perf_counter() - began
        self.metrics.saves += 1

    def wait_for_turn(self) -> None:
        """Wait until a save would not have to wait for an earlier one."""
        self._delivery.await_slot()

    def wait_for_copy(self) -> None:
        """Wait until the last save has copied all that it saves: anybody may change it now."""
        self._fence.wait()

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
        self._prepare()
        origin, _ = self._agree(self._origin(step), 0)
        self._delivery.send(
            SaveFolder(origin, target, (), self._rank, files=tuple(files), scratch=scratch)
        )
        self.metrics.saves += 1
        return origin.save_id

    def link(self, source: str, target: str, *, symbolic: bool = False) -> None:
        """Show a checkpoint under a second name, after everything asked for so far."""
        self._delivery.run_errand(Link(source, target, symbolic))

    def remove(self, target: str) -> None:
        """Remove a checkpoint, after everything asked for so far and never before a success."""
        self._delivery.run_errand(Remove(target))

    def progress(self) -> tuple[int, int]:
        """Bytes of the saves under way that are in files already, and all of them."""
        return self._delivery.progress()

    def poll(self) -> list[Committed | Failed]:
        """What has become of saves since the last call, and which errands failed."""
        self.metrics.in_flight = self._delivery.count
        self.metrics.fence_s = self._fence.waited
        return self._delivery.poll()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is committed or has failed, and every link and removal is done.

        Raises:
            TimeoutError: after ``timeout`` seconds.
        """
        self._delivery.wait(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Wait, end the writer and give folders and memory back."""
        self._fence.unwatch()
        try:
            self._delivery.close(timeout)
        finally:
            for lock in self._locks.values():
                if lock is not None:
                    lock.release()
            self._locks = {}

    def _prepare(self) -> None:
        self._delivery.await_slot()
        self._fence.wait()  # one copy at a time

    def _take(self, save: Save, divided: Plan, owned: Owned) -> None:
        self._require_memory(divided)
        memory = self._delivery.memory()
        snapshot = memory.reserve(divided.nbytes)
        for piece, content in divided.constants:
            snapshot[piece.offset : piece.offset + piece.nbytes] = _as_tensor(content)
        copy_now(divided.now, snapshot)
        if not divided.later:
            self._delivery.send(save, memory)
            return
        later = LaterCopy(divided.later, snapshot, owned)
        self._fence.close()
        self._delivery.send(save, memory, prepare=lambda: self._complete(later))

    def _complete(self, later: LaterCopy) -> str:
        try:
            changed = later.run()
        finally:
            self._fence.open()
        if not changed:
            return ""
        self._overlap = False  # from the next save on
        return (
            f"{changed} was changed outside an optimizer step while it was copied, so this "
            "checkpoint would mix two steps and was dropped; later ones are copied at once. "
            "Change parameters in the optimizer step only, or set snapshot='blocking'"
        )

    def _require_memory(self, divided: Plan) -> None:
        limit, needed = self.settings.host_memory_limit, divided.nbytes
        needed *= self.settings.max_in_flight
        if limit is not None and needed > limit:
            raise ValueError(
                f"host_memory_limit={limit} bytes is less than the {needed} that snapshots of this "
                "state take; raise it, lower max_in_flight, or use format='sharded' on more ranks"
            )

    def _require_group(self) -> None:
        if self._group is None and self._ranks > 1:
            raise ValueError(
                f"{self._ranks} ranks write one folder together, so they need a group on CPU, got "
                "group=None; give dist.new_group(backend='gloo')"
            )

    def _origin(self, step: int) -> Origin:
        return Origin(os.urandom(8).hex(), step, time.time_ns(), self._ranks)

    def _agree(self, origin: Origin, shape: int) -> tuple[Origin, bool]:
        """Rank 0's origin, and whether all ranks divide the state alike. Collective."""
        self._require_group()
        if self._group is None:
            return origin, True
        mine = {"save_id": origin.save_id, "created_ns": origin.created_ns, "shape": shape}
        facts = all_facts(mine, group=self._group, device=torch.device("cpu"))
        first = facts[0]
        alike = all(of_rank["shape"] == first["shape"] for of_rank in facts)
        agreed = replace(origin, save_id=first["save_id"], created_ns=first["created_ns"])
        return agreed, alike

    def _on_committed(self, event: Committed) -> None:
        self.last_committed = event
        self.metrics.write_s, self.metrics.bytes = event.seconds, event.nbytes

    def _on_failed(self, event: Failed) -> None:
        self.metrics.failed += 1


def _as_tensor(content: bytes) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
