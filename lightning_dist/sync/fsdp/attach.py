"""``compress_fsdp``: what a model that ``fully_shard`` (FSDP2) has sharded sends, compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_dist.base.private import loss_scale_of, name_before_compile
from lightning_dist.exchange.replicate import replicate
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.sharded import ShardedSettings
from lightning_dist.settings.signatures import arguments_of, takes
from lightning_dist.sync.ddp import compile_kernels as compile_at_set_up
from lightning_dist.sync.ddp import describe_parameters, if_attached_to, remember
from lightning_dist.sync.fsdp.checks import (
    ParameterGroup,
    gathered_groups,
    shard_dimension,
    trained_groups,
)
from lightning_dist.sync.fsdp.replicas import (
    ShardedGradients,
    ShardedGroup,
    layout_of,
    local_of,
)
from lightning_dist.sync.fsdp.shards import CompressedShards
from lightning_dist.sync.networks import sharded_network
from lightning_dist.sync.optimizers import OptimizerWatch
from lightning_dist.sync.rules import require_effect, require_first

ShardedExchange: TypeAlias = ShardedGradients | CompressedShards
"""Compression of a sharded model: between its replicas, or over all ranks."""

_attached: WeakValueDictionary[int, ShardedExchange] = WeakValueDictionary()
"""By the id of the model, which must stay copyable, so that nothing may be hung on it."""


@takes(ShardedSettings, refuse=arguments_of(fully_shard))
def compress_fsdp(
    model: nn.Module,
    settings: ShardedSettings,
    *,
    mesh: DeviceMesh,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """Compress the gradients of a sharded ``model`` between its replicas. Collective.

    ``mesh`` has two dimensions, replicas and shards (of a mesh that has more, such as one for
    tensor parallelism, give these two), and ``fully_shard`` was called over the
    dimension of the shards::

        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        gradients = compress_fsdp(model, "int8", mesh=mesh)

    Gradients are reduce-scattered inside a replica as usual. Each rank exchanges its shard between
    replicas, compressed: ``4 n / shards`` bytes of residual per rank, and ``1 / shards`` of the
    bytes that DDP with this codec sends. Parameters and buffers are first made those of the first
    replica.

    Args:
        settings: each an argument of this function. ``"none"`` gives the bits of ``fully_shard``
            over both dimensions with a reduction in float32.
        mesh: replicas and shards; the same on each of its ranks. With ``parameters`` all ranks.
        grad_scaler: the GradScaler in use, so that residuals are kept unscaled.

    Returns:
        Handle of the gradient exchange, :class:`ShardedGradients`: ``no_sync()``, ``comm_stats()``,
        ``state_dict()``, ``load_state_dict()``, ``close()``; with ``parameters``
        :class:`CompressedShards`, without ``no_sync()``.

    Raises:
        ValueError: a model that ``fully_shard`` did not shard over one dimension of ``mesh``, or in
            a way in which gradients cannot be exchanged afterwards, or that is compressed already;
            ranks whose settings differ.
    """
    scale = loss_scale_of(grad_scaler)
    attach = attach_replicas if settings.parameters is None else attach_shards
    return attach(model, settings, mesh=mesh, grad_scale=scale)


def attach_shards(
    model: nn.Module,
    settings: ShardedSettings,
    *,
    mesh: DeviceMesh,
    grad_scale: Callable[[], Tensor | None] | None = None,
) -> CompressedShards:
    """:func:`compress_fsdp` with ``parameters=`` and checked settings. Collective.

    Raises:
        ValueError: a GradScaler and error feedback; a model that is compressed already.
    """
    require_first(exchange_of(model), name="compress_fsdp")
    if grad_scale is not None and settings.keeps_rounded_errors:
        raise ValueError(
            "With parameters= and error_feedback=True gradients must not be scaled, got a "
            "GradScaler: the error would be kept scaled, also of steps that it skips; use an "
            "unbiased codec such as 'qsgd:bits=8', or compute in bfloat16 without a GradScaler"
        )
    shards = CompressedShards(model, settings, groups=gathered_groups(model, mesh))
    _attached[id(model)] = shards
    return shards


def attach_replicas(
    model: nn.Module,
    settings: ExchangeSettings,
    *,
    mesh: DeviceMesh,
    continue_from: Reducer | None = None,
    grad_scale: Callable[[], Tensor | None] | None = None,
) -> ShardedGradients:
    """:func:`compress_fsdp` between replicas, with checked settings. Collective.

    Args:
        continue_from: the reducer of an earlier fit; if it was of this model, its residuals and
            step count go on.
        grad_scale: as of :class:`Reducer`.
    """
    require_first(exchange_of(model), name="compress_fsdp")
    continue_from = if_attached_to(model, continue_from)
    groups = trained_groups(model, mesh)
    names: dict[Tensor, str] = {p: name_before_compile(n) for n, p in model.named_parameters()}
    shards = shard_dimension(groups, mesh)
    parameters = describe_parameters(model)
    network = sharded_network(mesh, shards, settings, parameters=parameters)
    require_effect(settings, names, says=dist.get_rank() == 0)
    between: Any = network.intra.inter if network.intra else network
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    replicate({n: local_of(tensor.detach()) for n, tensor in held.items()}, between.data)

    def laid_out(groups: Sequence[ParameterGroup]) -> list[ShardedGroup]:
        return [layout_of(group, names) for group in groups]

    layouts = laid_out(groups)
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
    OptimizerWatch(reducer, model)
    remember(model, reducer)
    gradients = _attached[id(model)] = ShardedGradients(
        model, reducer, layouts, renewed=lambda: laid_out(trained_groups(model, mesh))
    )
    return gradients


def exchange_of(model: nn.Module) -> ShardedExchange | None:
    """Compression of a sharded ``model``; None if there is none, or no longer."""
    found = _attached.get(id(model))
    return None if found is None or found.closed else found
