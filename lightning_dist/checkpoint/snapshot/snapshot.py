"""Takes the bytes of a save and hands them on: copied at once, or while training goes on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.checkpoint.disk.jobs import Save
from lightning_dist.checkpoint.snapshot.copying import LaterCopy, copy_now
from lightning_dist.checkpoint.snapshot.fence import Fence
from lightning_dist.checkpoint.snapshot.plan import Owned, Plan, owned_by
from lightning_dist.checkpoint.writer_queue import WriterQueue
from lightning_dist.settings.saving import CheckpointSettings


class Snapshots:
    """Snapshots for one queue, one after the other.

    What the watched optimizers own is copied later, until something else has changed it meanwhile.
    """

    def __init__(self, settings: CheckpointSettings, queue: WriterQueue) -> None:
        self.optimizers: list[Optimizer] = []
        self._settings, self._queue = settings, queue
        self.fence = Fence()
        """Steps wait for it while something is copied."""
        self._overlap = settings.snapshot in ("auto", "overlap")

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Copy what these optimizers own lazily, and hold their steps back until it is copied."""
        self.optimizers = list(optimizers)
        if self._overlap:
            self.fence.watch(self.optimizers)

    @property
    def overlap(self) -> bool:
        """Whether what the optimizers own is copied later."""
        return self._overlap and bool(self.optimizers)

    def owned(self) -> Owned:
        """Tensors that the optimizers own now."""
        return owned_by(self.optimizers)

    def take(self, save: Save, divided: Plan, owned: Owned) -> None:
        """Take what the plan says and have it saved; the snapshot before must be complete.

        Raises:
            ValueError: it takes more than ``host_memory_limit``.
        """
        self._require_memory(divided)
        memory = self._queue.memory()
        snapshot = memory.reserve(divided.nbytes)
        for piece, content in divided.constants:
            snapshot[piece.offset : piece.offset + piece.nbytes] = _as_tensor(content)
        copy_now(divided.now, snapshot)
        if not divided.later:
            self._queue.send(save, memory)
            return
        later = LaterCopy(divided.later, snapshot, owned)
        self.fence.close()
        self._queue.send(save, memory, prepare=lambda: self._complete(later))

    def _complete(self, later: LaterCopy) -> str:
        try:
            changed = later.run()
        finally:
            self.fence.open()
        if not changed:
            return ""
        self._overlap = False  # from the next save on
        return (
            f"{changed} was changed outside an optimizer step while it was copied, so this "
            "checkpoint would mix two steps and was dropped; later ones are copied at once. Change "
            "parameters in the optimizer step only, or set snapshot='blocking'"
        )

    def _require_memory(self, divided: Plan) -> None:
        limit, needed = self._settings.host_memory_limit, divided.nbytes
        needed *= self._settings.max_in_flight
        if limit is not None and needed > limit:
            raise ValueError(
                f"host_memory_limit={limit} bytes is less than the {needed} that snapshots of this "
                "state take; raise it, lower max_in_flight, or use format='sharded' on more ranks"
            )


def _as_tensor(content: bytes) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
