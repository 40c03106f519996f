"""``compress_fsdp``: what a model that ``fully_shard`` (FSDP2) has sharded sends, compressed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_dist.settings.exchange import ShardedSettings
from lightning_dist.settings.signatures import arguments_of, takes
from lightning_dist.sync.base import Environment
from lightning_dist.sync.fsdp.replicas import ShardedGradients
from lightning_dist.sync.fsdp.shards import CompressedShards


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
    environment = Environment(grad_scaler=grad_scaler, mesh=mesh)
    return kind_of(settings).attach(model, settings, environment)


def kind_of(settings: ShardedSettings) -> type[ShardedGradients | CompressedShards]:
    """Class of what ``settings`` ask for: between replicas, or with ``parameters`` all ranks."""
    return ShardedGradients if settings.parameters is None else CompressedShards
