"""What the checkpoint benchmark trains and saves."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.utils._pytree import tree_leaves

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.jobs import Failed
from lightning_dist.settings.run import CheckpointSettings

_BATCH = 64


class Training:
    """A perceptron and AdamW whose state takes ``mb`` megabytes; it has taken one step.

    These are a parameter and two moments of Adam for each layer, all of one size.
    """

    def __init__(self, mb: float, *, seed: int, layers: int = 32) -> None:
        torch.manual_seed(seed)
        width = round((mb * 1e6 / 4 / 3 / layers) ** 0.5)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(_BATCH, width)
        self.passes()
        self.step()

    def state(self) -> dict[str, Any]:
        """The live state, as a trainer hands it to what saves it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def passes(self) -> None:
        """Forward and backward."""
        self.model(self.inputs).square().mean().backward()

    def step(self) -> None:
        """The optimizer's part of a training step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def steps(self, goes_on: Callable[[int], bool]) -> list[float]:
        """Seconds of each step; ``goes_on`` is asked before each, with the number of those done."""
        seconds: list[float] = []
        while goes_on(len(seconds)):
            began = time.perf_counter()
            self.passes()
            self.step()
            seconds.append(time.perf_counter() - began)
        return seconds


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a state."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def nbytes_of(state: Any) -> int:
    """Bytes of all tensors in a state."""
    return sum(tensor.nbytes for tensor in tensors_of(state))


class Row:
    """One way to save the state of ``training``; by default one that is done when it returns.

    Args:
        save: saves as a path or something that begins with its name; what training is held by.
    """

    fenced = False
    """Whether the optimizer step must wait for the rest of a copy."""
    write_s = math.nan
    """Seconds that the last write took by its own account, without the copy."""
    held_s = 0.0
    """Seconds that optimizer steps were held back, in total."""

    def __init__(self, training: Training, save: Callable[[Path], None]) -> None:
        self.training, self.save = training, save

    def open(self, folder: Path) -> None:
        """Prepare to save in ``folder``."""

    def is_done(self) -> bool:
        """Whether the last save is complete, without waiting."""
        return True

    def wait(self) -> None:
        """Wait until it is."""

    def before_step(self) -> None:
        """Call of the user before an optimizer step."""

    def close(self) -> None:
        """End what it has started."""


_SLICE = 8 << 20


def copy(training: Training) -> Row:
    """Copies all tensors into memory that has been written before; saves nothing."""
    copies = [torch.zeros_like(tensor) for tensor in tensors_of(training.state())]

    def save(target: Path) -> None:
        for mine, tensor in zip(copies, tensors_of(training.state()), strict=True):
            mine.copy_(tensor.detach())

    return Row(training, save)


def write(training: Training, *, early: bool) -> Row:
    """write(2) and fsync of memory of the state's size, in one run.

    early: have the kernel begin to write after every slice, not at the fsync.
    """
    nbytes = nbytes_of(training.state())
    content = memoryview(torch.randint(256, (nbytes,), dtype=torch.uint8).numpy())

    def save(target: Path) -> None:
        with open(target, "wb", buffering=0) as file:
            written = 0
            while written < nbytes:
                count = file.write(content[written : written + _SLICE])
                if early:
                    os.posix_fadvise(file.fileno(), written, count, os.POSIX_FADV_DONTNEED)
                written += count
            os.fsync(file.fileno())

    return Row(training, save)


def torch_save(training: Training, *, fsync: bool) -> Row:
    """``torch.save``, to the page cache or to the disk."""

    def save(target: Path) -> None:
        with open(target, "wb") as file:
            torch.save(training.state(), file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())

    return Row(training, save)


def lightning(training: Training) -> Row:
    """``TorchCheckpointIO``, which ModelCheckpoint saves with; nothing of it waits for the disk."""
    io = TorchCheckpointIO()
    return Row(training, lambda target: io.save_checkpoint(training.state(), target))


def dcp_save(training: Training) -> Row:
    """``torch.distributed.checkpoint.save``."""
    _one_rank()
    return Row(training, lambda target: dcp.save(training.state(), checkpoint_id=str(target)))


def _one_rank() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class DcpRow(Row):
    """``async_save`` to a thread or a process, with its default or a kept stager.

    Args:
        kept: the stager is kept, and copies in shared memory, or beside training.
    """

    def __init__(
        self, training: Training, *, kept: bool = True, process: bool = False, staging: bool = False
    ) -> None:
        super().__init__(training, self._save)
        _one_rank()
        self.fenced = staging
        self._options: dict[str, Any] = {}
        if kept:
            options = StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=process,
                use_async_staging=staging,
                use_non_blocking_copy=False,
            )
            self._options["async_stager"] = DefaultStager(options)
        if process:
            self._options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None

    def _save(self, target: Path) -> None:
        response = dcp.async_save(self.training.state(), checkpoint_id=str(target), **self._options)
        if isinstance(response, AsyncSaveResponse):
            self._staged, self._written = response.staging_completion, response.upload_completion
        else:
            self._written = response

    def is_done(self) -> bool:
        return self._written is None or self._written.done()

    def wait(self) -> None:
        if self._written is not None:
            self._written.result()

    def before_step(self) -> None:
        if self._staged is not None:
            began = time.perf_counter()
            self._staged.result()
            self.held_s += time.perf_counter() - began

    def close(self) -> None:
        if "async_stager" in self._options:
            self._options["async_stager"].close()


class OurRow(Row):
    """A :class:`Checkpointer` of its own, in its own folder."""

    def __init__(self, training: Training, **settings: Any) -> None:
        super().__init__(training, self._save)
        self.fenced = settings["snapshot"] == "overlap"
        self._checkpointer = Checkpointer(CheckpointSettings(**settings))
        self._checkpointer.watch([training.optimizer])
        self._saves = 0
        self.close = self._checkpointer.close

    def _save(self, target: Path) -> None:
        self._saves += 1
        self._checkpointer.save(self.training.state(), f"{target}.ckpt", step=self._saves)

    def open(self, folder: Path) -> None:
        self._checkpointer.open(str(folder))

    def is_done(self) -> bool:
        return not self._checkpointer.busy

    def wait(self) -> None:
        self._checkpointer.wait()
        self.write_s = self._checkpointer.metrics.write_ms / 1e3
        for event in self._checkpointer.poll():
            if isinstance(event, Failed):
                raise RuntimeError(event.reason)

    @property
    def held_s(self) -> float:
        self._checkpointer.poll()
        return self._checkpointer.metrics.optimizer_wait_ms / 1e3


class LightningAsyncRow(Row):
    """``AsyncCheckpointIO`` around ``TorchCheckpointIO``."""

    def __init__(self, training: Training) -> None:
        super().__init__(training, self._save)

        class Noticed(TorchCheckpointIO):
            """AsyncCheckpointIO has no other way to ask whether it has written."""

            def save_checkpoint(inner, *args: Any, **kwargs: Any) -> None:
                super().save_checkpoint(*args, **kwargs)
                self._done = True

        self._io = AsyncCheckpointIO(Noticed())
        self._done = True
        self.wait = self._io.teardown

    def _save(self, target: Path) -> None:
        self._done = False
        self._io.save_checkpoint(self.training.state(), target)

    def is_done(self) -> bool:
        return self._done


ROWS: dict[str, Callable[[Training], Row]] = {
    "ours overlap": partial(OurRow, snapshot="overlap"),
    "ours blocking": partial(OurRow, snapshot="blocking"),
    "ours sync": partial(OurRow, snapshot="sync"),
    "ours blocking, thread": partial(OurRow, snapshot="blocking", writer="thread"),
    "torch.save": partial(torch_save, fsync=False),
    "torch.save + fsync": partial(torch_save, fsync=True),
    "Lightning": lightning,
    "Lightning async": LightningAsyncRow,
    "dcp.save": dcp_save,
    "dcp.async_save": partial(DcpRow, kept=False),
    "dcp.async_save, reused": DcpRow,
    "dcp.async_save, async staging": partial(DcpRow, staging=True),
    "dcp.async_save, process": partial(DcpRow, process=True),
    "limit: memcpy": copy,
    "limit: write + fsync": partial(write, early=False),
    "limit: early write + fsync": partial(write, early=True),
}
