"""Models that ``fully_shard`` (FSDP2) has sharded over a fast dimension of a device mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Literal, TypeAlias, overload
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_dist.codecs import Codec
from lightning_dist.integrations.torch.checks import require_effect
from lightning_dist.integrations.torch.ddp import compile_kernels as compile_at_set_up
from lightning_dist.integrations.torch.ddp import describe_parameters, remember
from lightning_dist.integrations.torch.fsdp.checks import (
    ParameterGroup,
    gathered_groups,
    shard_dimension,
    trained_groups,
)
from lightning_dist.integrations.torch.fsdp.shards import CompressedShards, ShardSettings
from lightning_dist.integrations.torch.networks import sharded_network
from lightning_dist.private import at_end_of_backward, name_before_compile
from lightning_dist.reducer.plan.plans import Handle
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings import Settings
from lightning_dist.topology import Topology

_attached: WeakValueDictionary[int, ShardedGradients | CompressedShards] = WeakValueDictionary()
"""By the id of the model, which must stay copyable, so that nothing may be hung on it."""


@overload
def compress_fsdp(
    model: nn.Module,
    codec: str | Codec | Mapping[str, str | Codec] = "int8",
    *,
    mesh: DeviceMesh,
    parameters: None = None,
    error_feedback: bool | Literal["auto"] = "auto",
    min_compress_numel: int | None = None,
    start_step: int = 0,
    compile_kernels: bool | Literal["auto"] = "auto",
    commit: Literal["auto", "immediate", "deferred"] = "auto",
) -> ShardedGradients: ...


@overload
def compress_fsdp(
    model: nn.Module,
    codec: str | Codec,
    *,
    mesh: DeviceMesh,
    parameters: str | Codec,
    error_feedback: bool | Literal["auto"] = "auto",
    min_compress_numel: int | None = None,
    compile_kernels: bool | Literal["auto"] = "auto",
) -> CompressedShards: ...


def compress_fsdp(
    model: nn.Module,
    codec: str | Codec | Mapping[str, str | Codec] = "int8",
    *,
    mesh: DeviceMesh,
    parameters: str | Codec | None = None,
    error_feedback: bool | Literal["auto"] = "auto",
    min_compress_numel: int | None = None,
    start_step: int = 0,
    compile_kernels: bool | Literal["auto"] = "auto",
    commit: Literal["auto", "immediate", "deferred"] = "auto",
) -> ShardedGradients | CompressedShards:
    """Compress the gradients of a sharded ``model`` between its replicas. Collective.

    ``mesh`` has two dimensions, replicas and shards (of a mesh that has more, such as one for
    tensor parallelism, give these two), and ``fully_shard`` was called over the
    dimension of the shards::

        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        gradients = compress_fsdp(model, "int8", mesh=mesh)

    Gradients are reduce-scattered inside a replica as always. Each rank's shard alone crosses
    between replicas, compressed: ``4 n / shards`` bytes of residual per rank, and ``1 / shards`` of
    the bytes that DDP with this codec sends. Parameters and buffers are first made those of the
    first replica.

    Args:
        codec: as for :func:`~lightning_dist.compress_ddp`, between replicas. ``"none"`` gives the
            bits of ``fully_shard`` over both dimensions with a reduction in float32.
        mesh: replicas and shards; the same on each of its ranks.
        parameters: codec of the parameters, for a model that is sharded over all ranks of ``mesh``,
            without replicas: FSDP's own all-gather then sends them in it, and its reduce-scatter
            gradients in ``codec``, which has to be unbiased (``"qsgd:bits=8"``) or to keep its
            error in 8 bits (``error_feedback=True``: 1 byte and 2/block for every element of the
            *unsharded* model on every rank).
        compile_kernels: fuse the codec's kernels now (about 20 s the first time). ``"auto"``: for
            shards of 4 Mi elements or more if there is a compiler, and on an accelerator with
            Triton; with ``parameters`` on a CPU only. Same bytes on the wire either way.
        commit: as for :func:`~lightning_dist.compress_ddp`.

    Returns:
        The exchange of the gradients: ``no_sync()``, ``comm_stats()``, ``state_dict()``,
        ``load_state_dict()``, ``close()``; with ``parameters`` without ``no_sync()``.

    Raises:
        ValueError: a model that ``fully_shard`` did not shard over one dimension of ``mesh``, or in
            a way in which gradients cannot be exchanged afterwards; ranks whose settings differ.
    """
    settings = sharded_settings(
        codec,
        error_feedback=error_feedback,
        min_compress_numel=min_compress_numel,
        start_step=start_step,
        compile_kernels=compile_kernels,
        commit=commit,
    )
    if parameters is not None:
        return attach_shards(model, ShardSettings.check(settings, parameters), mesh=mesh)
    return attach_replicas(model, settings, mesh=mesh)


def sharded_settings(codec: str | Codec | Mapping[str, str | Codec], **settings: Any) -> Settings:
    """The checked settings of :func:`compress_fsdp`.

    Raises:
        ValueError: a setting is out of range, or cannot take effect for shards.
    """
    checked = Settings.check(codec, **settings)
    if not checked.intra.lossless:
        raise ValueError(
            f"inside a replica FSDP reduces gradients itself, got the codec {checked.intra.name!r} "
            "for it; give the codec between replicas alone"
        )
    return checked


def attach_shards(
    model: nn.Module, settings: ShardSettings, *, mesh: DeviceMesh
) -> CompressedShards:
    """What :func:`compress_fsdp` does with ``parameters=``, with checked settings. Collective."""
    shards = CompressedShards(model, settings, groups=gathered_groups(model, mesh))
    _attached[id(model)] = shards
    return shards


def attach_replicas(
    model: nn.Module,
    settings: Settings,
    *,
    mesh: DeviceMesh,
    continue_from: Reducer | None = None,
    grad_scale: Callable[[], Tensor | None] | None = None,
    timeout: timedelta | None = None,
) -> ShardedGradients:
    """What :func:`compress_fsdp` does between replicas, with checked settings. Collective.

    Args:
        continue_from: the reducer of an earlier fit; its residuals and step count go on.
        grad_scale: as of :class:`Reducer`.
        timeout: of the new process groups.
    """
    groups = trained_groups(model, mesh)
    names: dict[Tensor, str] = {p: name_before_compile(n) for n, p in model.named_parameters()}
    shards = shard_dimension(groups, mesh)
    parameters = describe_parameters(model)
    network = sharded_network(mesh, shards, settings, parameters=parameters, timeout=timeout)
    require_effect(settings, names, says=dist.get_rank() == 0)
    _broadcast_from_first_replica(model, network.intra.inter if network.intra else network)
    layouts = [_layout_of(group, names) for group in groups]
    reducer = Reducer(
        names,
        settings=settings,
        network=network,
        state=None if continue_from is None else continue_from.state,
        grad_scale=grad_scale,
        sharded=True,
        in_order=True,  # FSDP launches collectives of its own in the backward pass
    )
    if continue_from is not None:
        reducer.step = continue_from.step
        parts = [part for layout in layouts for part in layout.slices]
        reducer.state.keep_only({part.name: part.whole for part in parts})
    gradients_of_shards = [
        (group.parameters[0].dtype, part.numel) for group in layouts for part in group.slices
    ]
    compile_at_set_up(reducer, gradients_of_shards, says=dist.get_rank() == 0)
    remember(model, reducer)
    gradients = _attached[id(model)] = ShardedGradients(model, reducer, layouts)
    return gradients


def exchange_of(model: nn.Module) -> ShardedExchange | None:
    """What compresses what a sharded ``model`` sends; None if nothing does, or no more."""
    found = _attached.get(id(model))
    return None if found is None or found.closed else found


@dataclass
class _Group:
    """The parameters that one ``fully_shard`` call has put together."""

    module: FSDPModule
    parameters: Sequence[nn.Parameter]  # sharded, those that are trained
    slices: Sequence[ParameterSlice]  # of the flat gradient that the reduce-scatter leaves
    numel: int  # of that, with padding
    accumulated: bool = field(default=False)  # its gradients wait in `.grad` until the step is over


class ShardedGradients:
    """Averages the gradient shards of a model between replicas with ``reducer``.

    FSDP's all-reduce hook hands over the flat shard of a parameter group once it is reduced inside
    the replica; all have their mean before ``backward`` returns.
    """

    def __init__(self, model: nn.Module, reducer: Reducer, groups: Sequence[_Group]) -> None:
        self.model, self.reducer, self._groups = model, reducer, groups
        self.synchronises = True
        """Whether the next backward pass exchanges gradients between replicas."""
        self._under_way: dict[int, tuple[Handle, Callable[[], None]]] = {}
        self._queued = False
        for index, group in enumerate(groups):
            reducer.reserve(group.slices, group.parameters[0].dtype)
            group.module.set_all_reduce_hook(partial(self._reduced, index))
        self._unhook = model.register_forward_pre_hook(lambda *_: self.begin())

    @property
    def device(self) -> torch.device:
        """Of the gradients."""
        return self.reducer.network.device

    @property
    def closed(self) -> bool:
        """Whether nothing is exchanged any more."""
        return self.reducer.closed

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave out the exchange between replicas in the backward passes of this block.

        Gradients stay sharded; the first backward pass after it exchanges what has accumulated.
        """
        before, self.synchronises = self.synchronises, False
        try:
            yield
        finally:
            self.synchronises = before

    @property
    def topology(self) -> Topology:
        """Hosts and groups of the ranks."""
        return self.reducer.topology

    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent between replicas, as of ``Reducer.comm_stats``."""
        return self.reducer.comm_stats()

    def comm_config(self) -> dict[str, Any]:
        """Codec, hosts and versions, for the configuration of a tracked run."""
        return self.reducer.comm_config()

    def state_dict(self) -> dict[str, Any] | None:
        """Residuals of all replicas on rank 0, None elsewhere. Collective; between backward passes.

        As of ``Reducer.state_dict``: one row per replica, put together from its shards, so that any
        mesh loads it.
        """
        return self.reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict`, the same object on every rank; None starts afresh."""
        self.reducer.load_state_dict(state)

    def close(self) -> None:
        """Exchange nothing more, and end the reducer."""
        self._unhook.remove()
        for group in self._groups:
            group.module.set_all_reduce_hook(_nothing)
        self.reducer.close()

    def begin(self) -> None:
        """Give up what a backward pass that an exception has cut short has left.

        Called before each forward pass of the model; by whoever does not call the model itself.
        """
        if self._queued:
            self._queued = False
            self._under_way.clear()
            self.reducer.abandon()

    def _reduced(self, index: int, flat: Tensor) -> None:
        """The hook: ``flat (numel,)`` is the mean of the replica, of this rank's shard."""
        group = self._groups[index]
        if flat.numel() != group.numel:
            raise RuntimeError(
                f"every parameter of a group must get a gradient in each backward pass; one of "
                f"{', '.join(part.name for part in group.slices)} got none. Freeze it, or use "
                "fully_shard over both dimensions of the mesh"
            )
        accumulates = group.parameters[0].grad is not None
        group.accumulated = accumulates
        if not self.synchronises:
            return
        if not self._queued:
            self._queued = True
            # Before backward() returns: what follows (clipping, the optimizer) sees the mean.
            at_end_of_backward(self._finish)
        if not accumulates:
            self._start(index, flat)

    def _start(self, index: int, flat: Tensor, then: Callable[[], None] = lambda: None) -> None:
        handle = self.reducer.start(flat, self._groups[index].slices, key=index)
        self._under_way[index] = handle, then

    def _finish(self) -> None:
        for index, group in enumerate(self._groups):
            if group.accumulated:
                self._start(index, *_flat_gradients(group))
                group.accumulated = False
        self.reducer.finish()
        under_way, self._under_way, self._queued = self._under_way, {}, False
        for handle, then in under_way.values():
            handle.done.wait()
            then()


ShardedExchange: TypeAlias = ShardedGradients | CompressedShards
"""What compresses a sharded model: between its replicas, or where it is sharded over all ranks."""


def _flat_gradients(group: _Group) -> tuple[Tensor, Callable[[], None]]:
    """Accumulated gradients as one flat tensor, and what writes it back."""
    locals_ = [_local(parameter.grad) for parameter in group.parameters]
    flat = locals_[0].new_zeros(group.numel)
    views = [part.of(flat) for part in group.slices]
    for view, local in zip(views, locals_, strict=True):
        view.copy_(local.reshape(-1))

    def write_back() -> None:
        for view, local in zip(views, locals_, strict=True):
            local.copy_(view.view_as(local))

    return flat, write_back


def _layout_of(group: ParameterGroup, names: Mapping[Tensor, str]) -> _Group:
    """Each parameter's shard, one after the other, padded to the largest of all ranks."""
    slices, offset = [], 0
    of_all = zip(group.parameters, group.shapes, group.padded, strict=True)
    for parameter, shape, padded in of_all:
        local = _local(parameter)
        start = group.first_row(shape) * prod(shape[1:])
        rest = prod(shape) - start - local.numel()
        slices.append(
            ParameterSlice(names[parameter], offset, tuple(local.shape), start=start, rest=rest)
        )
        offset += padded
    return _Group(group.module, group.parameters, slices, offset)


def _broadcast_from_first_replica(model: nn.Module, network: Any) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(_local(tensor.detach()), group_src=0, group=network.data.group)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _nothing(_: Tensor) -> None:
    pass
