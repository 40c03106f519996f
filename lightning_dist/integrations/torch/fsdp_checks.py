"""Sharded models whose gradients can be exchanged after the reduce-scatter; others refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import Shard

from lightning_dist.private import (
    averages_replicas,
    parameter_groups_of,
    shard_group_of,
    size_before_sharding,
)


@dataclass(frozen=True)
class ParameterGroup:
    """The trained parameters that one ``fully_shard`` call has put together, in FSDP's order.

    Args:
        shapes: of the parameters before they were sharded over ``group``; with tensor parallelism
            those of this rank's parts.
        padded: elements of each parameter's shard in the flat gradient.
    """

    module: FSDPModule
    group: dist.ProcessGroup
    parameters: Sequence[nn.Parameter]
    shapes: Sequence[Sequence[int]]
    padded: Sequence[int]

    def first_row(self, shape: Sequence[int]) -> int:
        """Row of a parameter of ``shape`` at which this rank's shard begins."""
        rows = -(-shape[0] // self.group.size())
        return min(self.group.rank() * rows, shape[0])


def parameter_groups(model: nn.Module, mesh: DeviceMesh) -> list[ParameterGroup]:
    """The parameter groups of ``model``, in the order of its modules.

    Raises:
        ValueError: ``mesh`` has not two dimensions, or a group is of a kind whose gradients FSDP
            changes or copies after its all-reduce hook.
    """
    if mesh.ndim != 2:
        raise ValueError(
            f"mesh must have two dimensions, replicas and shards, got {mesh.ndim}; give "
            "init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard'))"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "compress_fsdp needs fully_shard (FSDP2), got FullyShardedDataParallel (FSDP1), which "
            "has no place for it; call fully_shard on the blocks and the model instead"
        )
    found = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in _groups_of(module)
    ]
    if not found:
        raise ValueError(
            "compress_fsdp needs a model with parameters that fully_shard has sharded, got "
            f"{type(model).__name__}; call fully_shard(model, mesh=mesh['shard']) first, or use "
            "compress_ddp for a model that every rank holds as a whole"
        )
    return found


@dataclass(frozen=True)
class GatheredGroup:
    """All parameters that one ``fully_shard`` call has put together, in FSDP's order.

    Args:
        padded: elements of each parameter's shard, as it is gathered.
        dtype: in which parameters are gathered.
        reduce_dtype: in which gradients are reduced.
    """

    module: FSDPModule
    group: dist.ProcessGroup
    parameters: Sequence[nn.Parameter]
    padded: Sequence[int]
    dtype: torch.dtype
    reduce_dtype: torch.dtype


def gathered_groups(model: nn.Module, mesh: DeviceMesh) -> list[GatheredGroup]:
    """The parameter groups of ``model``, which is sharded over all ranks of ``mesh``.

    Raises:
        ValueError: there is none, or there are several replicas; or a group is of a kind whose
            collectives cannot be replaced.
    """
    found = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in _gathered_group_of(module)
    ]
    ranks = sorted(mesh.mesh.flatten().tolist())
    own = sorted({tuple(sorted(dist.get_process_group_ranks(each.group))) for each in found})
    if own != [tuple(ranks)] or len(ranks) == 1:
        raise ValueError(
            "parameters= needs a model that fully_shard has sharded over all ranks of mesh, got "
            f"shards on the ranks {own} and the mesh {mesh.mesh.tolist()}; with several replicas "
            "leave parameters out: inside a replica FSDP gathers them itself"
        )
    return found


def _gathered_group_of(module: FSDPModule) -> list[GatheredGroup]:
    groups, name = parameter_groups_of(module), type(module).__name__
    _require_one_group(groups)
    if not groups:
        return []
    (group,) = groups
    _require_replaceable(group, name)
    policy, fsdp_params = group.mp_policy, group.fsdp_params
    kept = {each.sharded_param.dtype for each in fsdp_params}
    if len(kept) > 1 or not all(dtype.is_floating_point for dtype in kept):
        raise ValueError(
            f"fully_shard({name}) must have parameters of one floating-point dtype to gather them "
            f"quantised, got {sorted(map(str, kept))}; call it for those of each dtype"
        )
    (dtype,) = kept
    compute = policy.param_dtype or dtype
    reduced = policy.reduce_dtype or compute
    if torch.float16 in (dtype, compute, reduced):
        raise ValueError(
            f"fully_shard({name}) must not use float16, in which FSDP divides gradients on both "
            "sides of its reduction; use bfloat16 or float32"
        )
    for each in fsdp_params:
        if each.fsdp_placement != Shard(0):
            raise _not_the_first_dimension(name, each.fsdp_placement)
    return [
        GatheredGroup(
            module,
            shard_group_of(group),
            [each.sharded_param for each in fsdp_params],
            [each.padded_sharded_param_size.numel() for each in fsdp_params],
            compute,
            reduced,
        )
    ]


def shard_dimension(groups: Sequence[ParameterGroup], mesh: DeviceMesh) -> int:
    """The dimension of ``mesh`` that parameters are sharded over.

    Raises:
        ValueError: there is none, or there is only one replica.
    """
    own = {tuple(dist.get_process_group_ranks(group.group)) for group in groups}
    for dimension in range(2):
        line = _line_of(mesh, dimension)
        if own == {line}:
            if mesh.size(1 - dimension) == 1:
                raise ValueError(
                    "compress_fsdp needs several replicas, got one: nothing crosses between "
                    "replicas, and FSDP alone does the rest; leave it out, or shard over fewer "
                    "ranks"
                )
            return dimension
    raise ValueError(
        f"parameters must be sharded over one dimension of mesh, got shards on the ranks "
        f"{sorted(own)} and the mesh {mesh.mesh.tolist()}; call fully_shard with mesh['shard']"
    )


def _line_of(mesh: DeviceMesh, dimension: int) -> tuple[int, ...]:
    """Ranks of this rank's line of ``mesh`` along ``dimension``."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank of the mesh"
    return tuple(mesh.mesh.select(1 - dimension, coordinate[1 - dimension]).tolist())


def _groups_of(module: FSDPModule) -> list[ParameterGroup]:
    groups = parameter_groups_of(module)
    trained = [[each for each in g.fsdp_params if each.sharded_param.requires_grad] for g in groups]
    _require_one_group(groups)
    if not groups or not trained[0]:
        return []
    (group,), (fsdp_params,) = groups, trained
    name = type(module).__name__
    _require_replaceable(group, name)
    for each in fsdp_params:
        kept = each.sharded_param.dtype
        reduced = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype or kept
        if kept == torch.float16:
            raise ValueError(
                f"fully_shard({name}) must not have parameters in float16, in which FSDP divides "
                "gradients once more after they are exchanged; keep parameters in bfloat16 or "
                "float32"
            )
        if reduced != kept:
            raise ValueError(
                f"fully_shard({name}) must reduce gradients in the dtype of its parameters, got "
                f"reduce_dtype {reduced} for parameters in {kept}: FSDP copies the gradients "
                f"before they are exchanged; set MixedPrecisionPolicy(reduce_dtype={kept})"
            )
        if each.fsdp_placement != Shard(0):
            raise _not_the_first_dimension(name, each.fsdp_placement)
    return [
        ParameterGroup(
            module,
            shard_group_of(group),
            [each.sharded_param for each in fsdp_params],
            [size_before_sharding(each) for each in fsdp_params],
            [each.padded_sharded_param_size.numel() for each in fsdp_params],
        )
    ]


def _require_one_group(groups: Sequence[Any]) -> None:
    if len(groups) > 1:
        raise ValueError(
            "fully_shard must put the parameters of a module in one group, got several "
            "(shard_placement_fn with several meshes); call it for the parts of the module"
        )


def _require_replaceable(group: Any, name: str) -> None:
    if averages_replicas(group):
        raise ValueError(
            f"fully_shard({name}) over two dimensions averages over replicas itself, uncompressed; "
            "call it with mesh['shard'], and give compress_fsdp the whole mesh"
        )
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise ValueError(
            f"gradients must stay on their device, and fully_shard({name}) has a CPUOffloadPolicy, "
            "which copies them away before they are exchanged; leave it out"
        )


def _not_the_first_dimension(name: str, placement: object) -> ValueError:
    return ValueError(
        f"fully_shard({name}) must shard the first dimension, got {placement}; leave "
        "shard_placement_fn out"
    )
