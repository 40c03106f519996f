"""Sharded models (FSDP2) for the profiler, which knows DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.integrations.profiler.local import LocalModel
from lightning_dist.integrations.torch.fsdp.replicas import ShardedGradients, exchange_of
from lightning_dist.integrations.torch.fsdp.shards import replaced_collectives
from lightning_dist.integrations.torch.local.updates import updates_of
from lightning_dist.profiling.capture.recorder import Recorder


def as_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """What is profiled: DDP, shards that are compressed, or local updates; None of others."""
    updates = updates_of(getattr(model, "module", model))
    if updates is not None:
        return cast(DistributedDataParallel, LocalModel(updates))
    if isinstance(model, DistributedDataParallel):
        return model
    found = exchange_of(model)
    if not isinstance(found, ShardedGradients):
        return None
    return cast(DistributedDataParallel, ShardedModel(found))


class ShardedModel:
    """Has of a DistributedDataParallel what the profiler asks for.

    A step begins with the forward pass of the outermost module that ``fully_shard`` was called on:
    Lightning calls methods of its module, not the module.
    """

    is_multi_device_module = False
    bucket_bytes_cap = None

    def __init__(self, gradients: ShardedGradients) -> None:
        self._gradients, self.module = gradients, gradients.model
        self.device = gradients.reducer.network.device
        self.process_group = dist.group.WORLD
        found = (each for each in self.module.modules() if isinstance(each, FSDPModule))
        self._outermost: Any = next(found)

    @property
    def require_backward_grad_sync(self) -> bool:
        return self._gradients.synchronises

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def register_forward_pre_hook(self, hook: Any) -> Any:
        return self._outermost.register_forward_pre_hook(hook)

    def register_forward_hook(self, hook: Any) -> Any:
        return self._outermost.register_forward_hook(hook)

    def watch_collectives(self, recorder: Recorder) -> ExitStack:
        """Let ``recorder`` know of FSDP's own collectives, until what is returned is closed.

        What FSDP calls stays in place, a user's own too, and allocates as before. Collectives in
        symmetric memory are left alone: FSDP asks what class they are of.
        """
        stack = ExitStack()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                stack.enter_context(replaced_collectives(module, partial(self._recorded, recorder)))
        return stack

    def _recorded(self, recorder: Recorder, op: str, comm: Any) -> _Recorded | None:
        is_symmetric = type(comm).__name__.startswith("SymmMem")
        return None if is_symmetric else _Recorded(op, comm, recorder, self.module)


@dataclass(frozen=True)
class _Recorded:
    """A collective of FSDP, recorded while ``model`` trains."""

    op: str
    comm: Any
    recorder: Recorder
    model: nn.Module

    @property
    def allocate(self) -> Any:
        return self.comm.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **how: Any
    ) -> dist.Work | None:
        call = partial(self.comm, output_tensor, input_tensor, group, **how)
        if not self.model.training:
            return cast("dist.Work | None", call())
        sent = (group.size() - 1) * min(output_tensor.nbytes, input_tensor.nbytes)
        launched = self.recorder.collective(self.op, group="intra", sent=sent)
        work: dist.Work | None = call()
        launched(work)
        return work
