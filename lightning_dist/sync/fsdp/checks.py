"""Sharded models whose gradients can be exchanged, and the end of their backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lightning_dist.base.private import at_end_of_backward, is_in_backward, tensors_in
from lightning_dist.reducer.stats import untraced
from lightning_dist.sync.fsdp.private import (
    after_reductions,
    averages_replicas,
    divides_after_reduction,
    dtypes_of,
    param_dtype_of,
    parameter_groups_of,
    shard_group_of,
    size_before_sharding,
)


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters that one ``fully_shard`` call has put together, in FSDP's order.

    Args:
        shapes: of the parameters before they were sharded over ``group``; with tensor parallelism
            those of this rank's parts.
        padded: elements of each parameter's shard in the flat tensors that are exchanged.
        dtype: in which parameters are gathered.
        reduce_dtype: in which gradients are reduced.
        divides_last: gradients are divided once more after FSDP's all-reduce hook.
    """

    module: FSDPModule
    group: dist.ProcessGroup
    parameters: Sequence[nn.Parameter]
    shapes: Sequence[Sequence[int]]
    padded: Sequence[int]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    divides_last: bool

    def first_row(self, shape: Sequence[int]) -> int:
        """Row of a parameter of ``shape`` at which this rank's shard begins."""
        rows = -(-shape[0] // self.group.size())
        return min(self.group.rank() * rows, shape[0])


def trained_groups(model: nn.Module, mesh: DeviceMesh) -> list[ParameterGroup]:
    """The trained parameters of ``model`` by group, in the order of its modules.

    Raises:
        ValueError: ``mesh`` has not two dimensions, or a group is of a kind whose gradients FSDP
            changes or copies after its all-reduce hook.
    """
    if mesh.ndim != 2:
        raise ValueError(
            f"mesh must have two dimensions, replicas and shards, got {mesh.ndim}; give "
            "init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard')), "
            "or parameters='int8' if the model is sharded over all ranks"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "compress_fsdp needs fully_shard (FSDP2), got FullyShardedDataParallel (FSDP1), which "
            "has no hook for it; call fully_shard on the blocks and the model instead"
        )
    groups = list(sharded_groups(model))
    if not groups:
        raise ValueError(
            "compress_fsdp needs a model with parameters that fully_shard has sharded, got "
            f"{type(model).__name__}; call fully_shard(model, mesh=mesh['shard']) first, or use "
            "compress_ddp for a model that every rank holds as a whole"
        )
    require_all_sharded(model, groups)
    for group in groups:
        name = type(group.module).__name__
        for kept in dict.fromkeys(parameter.dtype for parameter in group.parameters):
            if group.reduce_dtype != kept:
                raise ValueError(
                    f"fully_shard({name}) must reduce gradients in the dtype of its parameters, "
                    f"got reduce_dtype {group.reduce_dtype} for parameters in {kept}: FSDP copies "
                    "the gradients before they are exchanged; set "
                    f"MixedPrecisionPolicy(reduce_dtype={kept})"
                )
            if kept == torch.float16 or group.divides_last:
                raise ValueError(
                    f"fully_shard({name}) must not divide gradients once more after they are "
                    "exchanged, as it does in float16, in float64 on three shards or more, and "
                    f"after set_force_sum_reduction_for_comms(True), got parameters in {kept} on "
                    f"{group.group.size()} shards; keep parameters in bfloat16 or float32, and "
                    "leave that call out"
                )
    return groups


def gathered_groups(model: nn.Module, mesh: DeviceMesh) -> list[ParameterGroup]:
    """All parameters of ``model`` by group; it is sharded over all ranks of ``mesh``.

    Raises:
        ValueError: there is none, or there are several replicas; or a group is of a kind whose
            collectives cannot be replaced.
    """
    groups = list(sharded_groups(model, trained=False))
    ranks = sorted(mesh.mesh.flatten().tolist())
    sharded = sorted({tuple(sorted(dist.get_process_group_ranks(g.group))) for g in groups})
    if sharded != [tuple(ranks)] or len(ranks) == 1:
        raise ValueError(
            "parameters= needs a model that fully_shard has sharded over all ranks of mesh, got "
            f"shards on the ranks {sharded} and the mesh {mesh.mesh.tolist()}; with several "
            "replicas leave parameters out: inside a replica FSDP gathers them itself"
        )
    require_all_sharded(model, groups)
    for group in groups:
        name = type(group.module).__name__
        kept = {parameter.dtype for parameter in group.parameters}
        if len(kept) > 1 or not all(dtype.is_floating_point for dtype in kept):
            raise ValueError(
                f"fully_shard({name}) must have parameters of one floating-point dtype to gather "
                f"them quantised, got {sorted(map(str, kept))}; call it for those of each dtype"
            )
        if torch.float16 in (*kept, group.dtype, group.reduce_dtype):
            raise ValueError(
                f"fully_shard({name}) must not use float16, in which FSDP divides gradients on "
                "both sides of its reduction; use bfloat16 or float32"
            )
    return groups


def shard_dimension(groups: Sequence[ParameterGroup], mesh: DeviceMesh) -> int:
    """The dimension of ``mesh`` that parameters are sharded over.

    Raises:
        ValueError: there is none, or there is only one replica.
    """
    sharded = {tuple(dist.get_process_group_ranks(group.group)) for group in groups}
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank of the mesh"
    for dimension in range(2):
        line = mesh.mesh.select(1 - dimension, coordinate[1 - dimension])  # with this rank
        if sharded == {tuple(line.tolist())}:
            if mesh.size(1 - dimension) == 1:
                raise ValueError(
                    "compress_fsdp needs several replicas, got one: nothing crosses between "
                    "replicas, and FSDP alone does the rest; leave it out, or shard over fewer "
                    "ranks"
                )
            return dimension
    raise ValueError(
        "parameters must be sharded over one dimension of mesh, got shards on the ranks "
        f"{sorted(sharded)} and the mesh {mesh.mesh.tolist()}; call fully_shard with "
        "mesh['shard'], in configure_model with self.device_mesh['data_parallel']"
    )


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, as those that a forward pass without gradients leaves.

    They would be taken for the module's own, and the next forward pass would use them, not what
    shards are then.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def sharded_groups(model: nn.Module, *, trained: bool = True) -> Iterator[ParameterGroup]:
    """Groups of all parameters, or of ``trained`` ones; raises ValueError for what FSDP changes."""
    reshard(model)
    for module in model.modules():
        groups = parameter_groups_of(module) if isinstance(module, FSDPModule) else ()
        if len(groups) > 1:
            raise ValueError(
                "fully_shard must put the parameters of a module in one group, got several "
                "(shard_placement_fn with several meshes); call it for the parts of the module"
            )
        for group in groups:
            fsdp_params = group.fsdp_params
            if trained:
                fsdp_params = [param for param in fsdp_params if param.sharded_param.requires_grad]
            if fsdp_params:
                yield _checked(cast(FSDPModule, module), group, fsdp_params)


def require_all_sharded(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Raise ValueError if a trained parameter is outside of all ``fully_shard`` calls."""
    inside = {parameter for group in groups for parameter in group.parameters}
    named = model.named_parameters()
    outside = [name for name, p in named if p.requires_grad and p not in inside]
    if outside:
        raise ValueError(
            "fully_shard must have all trained parameters, as nothing averages the others; got "
            f"{', '.join(outside[:3])}{' ...' if len(outside) > 3 else ''} outside of it; call "
            "fully_shard for the model itself too, after its parts, or freeze them"
        )


def require_alike(optimizer: Optimizer, *, remedy: str) -> None:
    """Raise ValueError if ``optimizer`` keeps sharded state that is no part of its parameter's."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, DTensor) and value.shape != parameter.shape:
                raise ValueError(
                    f"The state of {type(optimizer).__name__} must have the shapes of its sharded "
                    f"parameters, got {name!r} of {tuple(value.shape)} for "
                    f"{tuple(parameter.shape)}: another mesh could not divide it; {remedy}"
                )


def _checked(module: FSDPModule, group: Any, fsdp_params: Sequence[Any]) -> ParameterGroup:
    name = type(module).__name__
    if averages_replicas(group):
        raise ValueError(
            f"fully_shard({name}) over two dimensions averages over replicas itself, uncompressed "
            "and in every step; call it with mesh['shard'], in configure_model with "
            "self.device_mesh['data_parallel']"
        )
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise ValueError(
            f"Gradients must stay on their device, and fully_shard({name}) has a CPUOffloadPolicy, "
            "which copies them away before they are exchanged; leave it out"
        )
    for param in fsdp_params:
        if param.fsdp_placement != Shard(0):
            raise ValueError(
                f"fully_shard({name}) must shard the first dimension, got {param.fsdp_placement}; "
                "leave shard_placement_fn out"
            )
    parameters = [param.sharded_param for param in fsdp_params]
    if len({param_dtype_of(param) for param in fsdp_params}) > 1:
        raise ValueError(
            f"fully_shard({name}) must cast its parameters to one dtype, and its "
            "MixedPrecisionPolicy has a param_dtype_override_fn; call fully_shard for those of "
            "each dtype"
        )
    compute, reduce = dtypes_of(fsdp_params[0])
    return ParameterGroup(
        module,
        shard_group_of(group),
        parameters,
        [size_before_sharding(param) for param in fsdp_params],
        [param.padded_sharded_param_size.numel() for param in fsdp_params],
        compute,
        reduce,
        divides_after_reduction(group, reduce),
    )


class BackwardEnd:
    """Calls ``end`` once at the end of each outermost backward pass of a model.

    A callback runs at the end of the backward pass in which it is queued. With reentrant
    checkpointing that is one within another, so it is queued by hooks of the model's outputs, with
    which the outermost one begins. And it runs before those that are queued later, as by further
    roots of ``fully_shard``, which reduce gradients then, so it queues itself once more.

    A stage of a pipeline reduces gradients after the backward passes of all micro-batches, outside
    of them. The end is then that of the reductions of ``model``, which has to be the stage.

    Args:
        begin: called before each forward pass of the model.
        cut_short: called before that, if a backward pass has not ended.
    """

    def __init__(
        self,
        model: nn.Module,
        end: Callable[[], None],
        *,
        begin: Callable[[], None] = lambda: None,
        cut_short: Callable[[], None],
    ) -> None:
        self._call, self._begin, self._cut_short = end, begin, cut_short
        self._queued = self._is_after = False
        self._unwatch: Callable[[], None] | None = None
        if isinstance(model, FSDPModule):
            self._unwatch = after_reductions(model, self._all_reduced)
        self._hooks = [  # before those of FSDP, which gather parameters
            model.register_forward_pre_hook(untraced(self._before_forward), prepend=True),
            model.register_forward_hook(untraced(self._after_forward)),
        ]

    def begin(self) -> None:
        """A forward pass begins, and no backward pass is under way but one that was cut short.

        Raises:
            RuntimeError: the reductions of a stage have not ended.
        """
        if is_in_backward():  # as a checkpoint does that covers the model
            return
        if self._queued:
            self._queued = False
            self._cut_short()
            if self._is_after:
                raise RuntimeError(
                    "The gradients of the last step of this stage were not averaged: a forward "
                    "pass begins before the schedule has waited for their reduction. Restart from "
                    "a checkpoint if an optimizer has used them"
                )
        self._begin()

    def watch(self, outputs: Any) -> None:
        """Nested collections of tensors with which a backward pass may begin, such as a loss."""
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.queue())  # type: ignore[no-untyped-call]

    def queue(self) -> None:
        """A backward pass is under way, or gradients are reduced after some.

        Raises:
            RuntimeError: the latter, of a module that is no stage.
        """
        if not self._queued:
            is_after = not is_in_backward()
            if is_after and self._unwatch is None:
                raise RuntimeError(
                    "Gradients are reduced outside of a backward pass, as in a pipeline, and "
                    "fully_shard was not called on the module that compress_fsdp got; call both "
                    "for each stage"
                )
            self._queued, self._is_after = True, is_after
            if not is_after:
                at_end_of_backward(lambda: at_end_of_backward(self._end))

    def _all_reduced(self) -> None:
        if self._queued and self._is_after:
            self._end()

    def remove(self) -> None:
        """Watch the model no longer."""
        for hook in self._hooks:
            hook.remove()
        if self._unwatch is not None:
            self._unwatch()

    def _before_forward(self, *_: Any) -> None:
        self.begin()

    def _after_forward(self, model: nn.Module, given: Any, outputs: Any) -> None:
        self.watch(outputs)

    def _end(self) -> None:
        assert self._queued, "once in a backward pass"
        self._queued = False
        self._call()
