"""The rows of the checkpoint benchmark: ways to save one state, behind one interface."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.checkpoint_dcp import DcpRow
from benchmarks.checkpoint_limits import CopyRow, WriteRow
from benchmarks.checkpoint_row import Row
from benchmarks.checkpoint_state import Training
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.jobs import Failed
from lightning_dist.checkpoint.settings import CheckpointSettings


class OurRow(Row):
    """A :class:`Checkpointer` of its own, in its own folder."""

    def __init__(
        self,
        training: Training,
        *,
        snapshot: Literal["overlap", "blocking", "sync"],
        writer: Literal["process", "thread"] = "process",
    ) -> None:
        super().__init__(training)
        self.fenced = snapshot == "overlap"
        self._checkpointer = Checkpointer(CheckpointSettings(snapshot=snapshot, writer=writer))
        self._checkpointer.watch([training.optimizer])
        self._saves = 0

    def save(self, target: Path) -> None:
        self._saves += 1
        self._checkpointer.save(self.training.state(), f"{target}.ckpt", step=self._saves)

    def open(self, folder: Path) -> None:
        self._checkpointer.open(str(folder))

    def is_done(self) -> bool:
        return not self._checkpointer.busy

    def wait(self) -> None:
        self._checkpointer.wait()
        self.write_s = self._checkpointer.metrics.write_s
        for event in self._checkpointer.poll():
            if isinstance(event, Failed):
                raise RuntimeError(event.reason)

    def held_back_s(self) -> float:
        self._checkpointer.poll()
        return self._checkpointer.metrics.fence_s

    def close(self) -> None:
        self._checkpointer.close()


class TorchSaveRow(Row):
    """``torch.save``, to the page cache or to the disk."""

    def __init__(self, training: Training, *, fsync: bool) -> None:
        super().__init__(training)
        self._fsync = fsync

    def save(self, target: Path) -> None:
        with open(target, "wb") as file:
            torch.save(self.training.state(), file)
            if self._fsync:
                file.flush()
                os.fsync(file.fileno())


class LightningRow(Row):
    """``TorchCheckpointIO``, which ModelCheckpoint saves with; nothing of it waits for the disk."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        from lightning.pytorch.plugins.io import TorchCheckpointIO

        self._io = TorchCheckpointIO()

    def save(self, target: Path) -> None:
        self._io.save_checkpoint(self.training.state(), target)


class LightningAsyncRow(Row):
    """``AsyncCheckpointIO`` around the same."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        class Noticed(TorchCheckpointIO):
            """AsyncCheckpointIO has no other way to ask whether it has written."""

            def save_checkpoint(inner, *args: Any, **kwargs: Any) -> None:
                super().save_checkpoint(*args, **kwargs)
                self._done = True

        self._io = AsyncCheckpointIO(Noticed())
        self._done = True

    def save(self, target: Path) -> None:
        self._done = False
        self._io.save_checkpoint(self.training.state(), target)

    def is_done(self) -> bool:
        return self._done

    def wait(self) -> None:
        self._io.teardown()


ROWS: dict[str, Callable[[Training], Row]] = {
    "ours overlap": partial(OurRow, snapshot="overlap"),
    "ours blocking": partial(OurRow, snapshot="blocking"),
    "ours sync": partial(OurRow, snapshot="sync"),
    "ours blocking, thread": partial(OurRow, snapshot="blocking", writer="thread"),
    "torch.save": partial(TorchSaveRow, fsync=False),
    "torch.save + fsync": partial(TorchSaveRow, fsync=True),
    "Lightning": LightningRow,
    "Lightning async": LightningAsyncRow,
    "dcp.save": partial(DcpRow, method="save"),
    "dcp.async_save": partial(DcpRow, method="async"),
    "dcp.async_save, reused": partial(DcpRow, method="reused"),
    "dcp.async_save, async staging": partial(DcpRow, method="staging"),
    "dcp.async_save, process": partial(DcpRow, method="process"),
    "limit: memcpy": CopyRow,
    "limit: write + fsync": partial(WriteRow, early=False),
    "limit: early write + fsync": partial(WriteRow, early=True),
}
