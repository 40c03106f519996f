"""Sharded models (FSDP2) and local updates for the profiler, which knows DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.profiling.capture.events import OF_NO_BUCKET
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.capture.steps import StepTimer
from lightning_dist.ranks.channel import Watch, nothing
from lightning_dist.sync.base import sync_of, sync_within
from lightning_dist.sync.fsdp.private import (
    collectives_of,
    parameter_groups_of,
    reduces_gradients,
)
from lightning_dist.sync.fsdp.replicas import ShardedGradients
from lightning_dist.sync.fsdp.shards import (
    CompressedShards,
    QuantisedCollective,
    replaced_collectives,
)
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.updates import LocalSync


def as_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The profiled part of ``model``: DDP, compressed shards, or local updates; None of others."""
    sync = sync_within(model, LocalSync)
    if sync is not None:
        return cast(DistributedDataParallel, LocalModel(sync.updates))
    if isinstance(model, DistributedDataParallel):
        return model
    sharded = sync_of(model)
    if isinstance(sharded, ShardedGradients | CompressedShards):
        return cast(DistributedDataParallel, ShardedModel(sharded))
    return None


class ShardedModel:
    """Stand-in for a DistributedDataParallel, with what the profiler asks for.

    A step begins with the forward pass of the outermost module that ``fully_shard`` was called on:
    Lightning calls methods of its module, not the module.
    """

    is_multi_device_module = False
    bucket_bytes_cap = None

    def __init__(self, exchange: ShardedGradients | CompressedShards) -> None:
        self.exchange, self.module = exchange, exchange.model
        self.device, self.process_group = exchange.device, dist.group.WORLD
        self.kind: Literal["replicas", "all_ranks"] = "replicas"
        if isinstance(exchange, CompressedShards):
            self.kind, self.process_group = "all_ranks", exchange.group
        self._sharded = [x for x in self.module.modules() if isinstance(x, FSDPModule)]
        self._outermost: Any = self._sharded[0]

    @property
    def require_backward_grad_sync(self) -> bool:
        if not isinstance(self.exchange, CompressedShards):
            return self.exchange.synchronises
        return any(map(reduces_gradients, self._groups()))

    @property
    def is_watched(self) -> bool:
        """Whether a recorder knows of its exchanges."""
        if not isinstance(self.exchange, CompressedShards):
            return self.exchange.reducer.is_watched
        collectives = chain.from_iterable(map(collectives_of, self._groups()))
        return any(isinstance(collective, _Quantised) for collective in collectives)

    def _groups(self) -> Iterator[Any]:
        """Parameter groups of all sharded modules."""
        return chain.from_iterable(map(parameter_groups_of, self._sharded))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def register_forward_pre_hook(self, hook: Any) -> Any:
        # Before FSDP's own, which gathers the first parameters.
        return self._outermost.register_forward_pre_hook(hook, prepend=True)

    def register_forward_hook(self, hook: Any) -> Any:
        return self._outermost.register_forward_hook(hook)

    def watch_collectives(self, recorder: Recorder) -> ExitStack:
        """Let ``recorder`` know of FSDP's own collectives, until what is returned is closed.

        What FSDP calls stays in place, a user's own too, and allocates as before. Collectives in
        symmetric memory are left alone: FSDP asks what class they are of.
        """
        stack = ExitStack()
        recorder.blocks = self.kind == "all_ranks" and recorder.is_of_host
        for index, module in enumerate(self._sharded):
            recorded = partial(self._recorded, recorder, index)
            stack.enter_context(replaced_collectives(module, recorded))
        return stack

    def _recorded(
        self, recorder: Recorder, index: int, op: str, comm: Any
    ) -> _Recorded | _Quantised | None:
        if isinstance(comm, QuantisedCollective):
            bucket = index if op == "reduce_scatter" else OF_NO_BUCKET
            return _Quantised(comm, recorder, self.module, bucket)
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
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any
    ) -> dist.Work | None:
        call = partial(self.comm, output_tensor, input_tensor, group, **options)
        if not self.model.training or group.size() == 1:
            return cast("dist.Work | None", call())
        sent = (group.size() - 1) * min(output_tensor.nbytes, input_tensor.nbytes)
        launched = self.recorder.collective(self.op, group="intra", sent=sent)
        work: dist.Work | None = call()
        launched(work)
        return work


class _Quantised(Watch):
    """A quantised collective, recorded while ``model`` trains: its codec, and the exchange.

    Gradients of a parameter group are a bucket.
    """

    def __init__(
        self, comm: QuantisedCollective, recorder: Recorder, model: nn.Module, bucket: int
    ) -> None:
        self._comm, self._recorder, self._model, self._bucket = comm, recorder, model, bucket
        self.allocate = comm.allocate
        self._work_ends: Callable[[], None] = nothing
        self._arrives: Callable[[None], None] = nothing

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **how: Any) -> None:
        if not self._model.training:
            self._comm(output_tensor, input_tensor, *args, **how)
            return
        recorder, bucket, of = self._recorder, self._bucket, self._comm.quantised
        if bucket != OF_NO_BUCKET:
            recorder.ready(bucket)
        self._comm.watch = self
        self._work_ends = recorder.works(bucket, "encode")
        try:
            self._comm(output_tensor, input_tensor, *args, **how)
        finally:
            self._comm.watch = None
        self._work_ends()
        if bucket != OF_NO_BUCKET:
            volume = of.raw.total, of.sent.intra, of.sent.inter, of.rows.codec
            recorder.note(bucket, recorder.device_clock.now(), volume)

    def launches(self, op: str, *, group: str, sent: int) -> Callable[[dist.Work], None]:
        self._work_ends()
        of, rows = self._comm.quantised, self._comm.quantised.rows
        self._arrives = self._recorder.collective(
            op,
            group=group,
            sent=sent,
            raw=of.raw.total,
            bucket=self._bucket,
            numel=rows.numel,
            codec=rows.codec,
        )
        return nothing

    def waits(self) -> Callable[[], None]:
        return self._arrived

    def _arrived(self) -> None:
        self._arrives(None)
        self._work_ends = self._recorder.works(self._bucket, "decode")


class LocalModel:
    """Stand-in for a DistributedDataParallel, with what the profiler asks for."""

    bucket_bytes_cap = None
    is_multi_device_module = False

    def __init__(self, updates: LocalUpdates) -> None:
        self.updates, self.module = updates, updates.module
        self.device = updates.reducer.network.device
        self.process_group = dist.group.WORLD

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the module."""
        return self.module.parameters()

    def watch_steps(self, timer: StepTimer) -> Callable[[], None]:
        """Tell ``timer`` of attempted steps, until what is returned is called.

        Each ends with ``updates.step()``, waiting included. Passes are not seen: a Trainer may call
        methods of its module, and not the module.
        """

        def stepped() -> None:
            timer.backward_ended(synchronised=True)
            timer.stepped()
            timer.end()

        self.updates.after_step.append(stepped)
        return partial(self.updates.after_step.remove, stepped)

    def why_not_in_detail(self) -> str:
        """Reason why exchanges cannot be timed; empty if they can."""
        settings = self.updates.settings
        if settings.overlap_steps:
            return f"with overlap_steps={settings.overlap_steps} an exchange is of many steps"
        if settings.ddp_steps:
            return "exchanges of the first ddp_steps are those of DDP"
        if self.device.type != "cpu":
            return "exchanges of local updates are timed on CPUs only"
        return ""
