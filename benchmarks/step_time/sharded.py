"""Rows of the step-time benchmark for sharded models (FSDP2); `__main__.py` explains them."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.step_time.models import MODELS, Workload
from benchmarks.step_time.rank import LEARNING_RATE, Tail, digest_of
from lightning_dist import compress_fsdp
from lightning_dist.integrations.torch.fsdp.shards import CompressedShards

FORM = "fsdp"
NATIVE, DEFERRED, ALL = "native-hsdp", "native-hsdp-deferred", "all-ranks"
ALL_INT8 = f"{ALL}-int8"
"""Parameters gathered in int8, and gradients reduced in qsgd of 8 bits."""
_MARK = "@"
"""Before the number of micro-batches of a step."""
ROWS = [
    *(f"{FORM}/{name}" for name in (NATIVE, ALL, ALL_INT8, "none", "bf16", "int8", "int4")),
    *(
        f"{FORM}/{name}{_MARK}4"
        for name in (NATIVE, DEFERRED, ALL, ALL_INT8, "none", "bf16", "int8", "int4")
    ),
]


def is_sharded(row: str) -> bool:
    """Whether the row is one of these."""
    return row.startswith(f"{FORM}/")


def has_replicas(row: str) -> bool:
    """Whether ranks hold what others hold."""
    return ALL not in row


def compress_all(model: Any, mesh: DeviceMesh, **settings: Any) -> CompressedShards:
    """Quantise the collectives of a model that is sharded over all ranks, as in `ALL_INT8`."""
    return compress_fsdp(model, "qsgd:bits=8", mesh=mesh, parameters="int8", **settings)


def micro_batches(row: str) -> int:
    """Backward passes of a step."""
    return int(row.partition(_MARK)[2] or 1)


class ShardedRow:
    """One sharded model of its own with its optimizer; what ``rank.Row`` is for DDP."""

    def __init__(self, name: str, *, seed: int, workload: Workload = MODELS["linear"]) -> None:
        torch.manual_seed(seed)
        self.name, self._passes, self._loss = name, micro_batches(name), workload.loss
        self._kind = name.removeprefix(f"{FORM}/").partition(_MARK)[0]
        ranks, world = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_world_size()
        mesh = init_device_mesh(
            "cpu", (world // ranks, ranks), mesh_dim_names=("replicate", "shard")
        )
        native = self._kind in (NATIVE, DEFERRED)
        own = mesh if native else mesh["shard"]
        if not has_replicas(name):
            own = init_device_mesh("cpu", (world,))
        self._model: Any = workload.make()
        for block in workload.blocks(self._model):
            fully_shard(block, mesh=own)
        fully_shard(self._model, mesh=own)
        self.optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self._gradients, self._shards, self.tail = None, None, Tail()
        if self._kind == ALL_INT8:
            self._shards = compress_all(self._model, own)
        elif not native and self._kind != ALL:
            self._gradients = compress_fsdp(self._model, self._kind, mesh=mesh)
            self._gradients.reducer.observe(self.tail)

    @property
    def handle(self) -> Any | None:
        """Our reducer; None where there is none."""
        return None if self._gradients is None else self._gradients.reducer

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One training step, of all micro-batches; returns when the parameters are updated."""
        for number in range(self._passes):
            last = number + 1 == self._passes
            if self._kind == DEFERRED:
                self._model.set_requires_all_reduce(last)
            ours = self._gradients
            with nullcontext() if ours is None or last else ours.no_sync():
                self._loss(self._model(inputs), targets).backward()
        self.optimizer.step()

    def digest(self) -> int:
        """Of the whole parameters; 0 where no rank has another's shard."""
        return digest_of(self._model) if has_replicas(self.name) else 0

    def forget(self) -> None:
        """Free the gradients, so that only the row whose turn it is holds any."""
        self.optimizer.zero_grad(set_to_none=True)

    def counted(self, key: str) -> int:
        """Bytes of the last step as our own counters have them; 0 where nothing counts."""
        return 0 if self.handle is None else int(self.handle.comm_stats()["last_step"][key])

    def close(self) -> None:
        """Let go of the model."""
        for ours in (self._gradients, self._shards):
            if ours is not None:
                ours.close()
