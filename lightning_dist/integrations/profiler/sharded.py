"""Sharded models (FSDP2) for the profiler, which knows DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.integrations.torch.fsdp import ShardedGradients, gradients_of


def as_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """What is profiled of ``model``: DDP itself, or shards that are compressed; None of others."""
    if isinstance(model, DistributedDataParallel):
        return model
    gradients = gradients_of(model)
    return None if gradients is None else cast(DistributedDataParallel, ShardedModel(gradients))


class ShardedModel:
    """Has of a DistributedDataParallel what the profiler asks for.

    A step begins with the forward pass of the outermost module that ``fully_shard`` was called on:
    Lightning calls methods of its module, not the module. What FSDP sends is not seen, only what
    crosses between replicas.
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
