"""torch.distributed.checkpoint as rows of the checkpoint benchmark."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.checkpoint_row import Row
from benchmarks.checkpoint_state import Training

Method = Literal["save", "async", "reused", "staging", "process"]


class DcpRow(Row):
    """``save``, or ``async_save`` with its default or a kept stager, to a thread or a process.

    ``"staging"`` copies in the background; nothing but the caller then keeps the optimizer from
    changing what is being copied. ``"process"`` keeps a stager in shared memory.
    """

    def __init__(self, training: Training, *, method: Method) -> None:
        super().__init__(training)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.fenced = method == "staging"
        self._method = method
        self._options: dict[str, Any] = {}
        if method in ("reused", "staging", "process"):
            self._options["async_stager"] = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=method == "process",
                    use_async_staging=method == "staging",
                    use_non_blocking_copy=False,
                )
            )
        if method == "process":
            self._options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None
        self._held = 0.0

    def save(self, target: Path) -> None:
        if self._method == "save":
            dcp.save(self.training.state(), checkpoint_id=str(target))
            return
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
            self._held += time.perf_counter() - began

    def held_back_s(self) -> float:
        return self._held

    def close(self) -> None:
        if "async_stager" in self._options:
            self._options["async_stager"].close()
