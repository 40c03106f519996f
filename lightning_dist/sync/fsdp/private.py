"""Private names of ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_dist.base.features import FSDP

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.fsdp import FSDPModule


# The schedule of a pipeline reduces gradients after the backward passes of all micro-batches.
def after_reductions(model: FSDPModule, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` whenever the gradients of the root ``model`` are reduced.

    Returns:
        A function that ends this.
    """
    FSDP.require()
    state: Any = model._get_fsdp_state()
    # Since torch 2.15 a schedule starts the reductions by itself, and waits for them later.
    waits = "wait_for_gradient_reduction"
    name = waits if hasattr(state, waits) else "_root_post_backward_final_callback"
    end = getattr(state, name)

    def then_call(*given: Any) -> None:
        end(*given)
        call()

    setattr(state, name, then_call)
    return lambda: vars(state).pop(name, None)


# FSDP tells nobody in which order parameters lie in the gradients that it reduces.
def parameter_groups_of(module: FSDPModule) -> Sequence[Any]:
    """Parameter groups that ``fully_shard`` has made of ``module``."""
    FSDP.require()
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    group = state._fsdp_param_group  # one for each module, before torch 2.12
    return [] if group is None else [group]


def averages_replicas(group: Any) -> bool:
    """Whether a parameter group is averaged over a second dimension of its mesh."""
    averages: bool = group._is_hsdp
    return averages


# `set_requires_gradient_sync` says nothing of what was set.
def reduces_gradients(group: Any) -> bool:
    """Whether a parameter group reduces its gradients in the next backward pass."""
    reduces: bool = group.reduce_grads
    return reduces


# FSDP tells nobody whether it divides within its reduction, or before and after it.
def divides_after_reduction(group: Any, dtype: torch.dtype) -> bool:
    """True if a parameter group divides gradients of ``dtype`` after its all-reduce hook."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    how = group.device.type, group.gradient_divide_factor, group.force_sum_reduction_for_comms
    _, after, *_ = _get_gradient_divide_factors(shard_group_of(group), None, dtype, *how)
    return after not in (None, 1.0)


# Whoever replaces them cannot ask what was there.
def collectives_of(group: Any) -> tuple[Any, Any]:
    """The all-gather and reduce-scatter objects of a parameter group."""
    return group._all_gather_comm, group._reduce_scatter_comm


# Of a mesh with a tensor-parallel dimension a parameter says all dimensions, and its whole shape.
def shard_group_of(group: Any) -> dist.ProcessGroup:
    """The ranks that the parameters of a parameter group are sharded over."""
    ranks: dist.ProcessGroup = group.mesh_info.shard_process_group
    return ranks


def size_before_sharding(fsdp_param: Any) -> Sequence[int]:
    """The shape that ``fully_shard`` has sharded: with tensor parallelism that of this rank."""
    size: Sequence[int] = fsdp_param._orig_size
    return size


# Since torch 2.15 those of a group may have several.
def param_dtype_of(fsdp_param: Any) -> torch.dtype | None:
    """Dtype to which a parameter is cast when it is gathered; None: it is not."""
    dtype: torch.dtype | None = fsdp_param.mp_policy.param_dtype
    return dtype


# Each parameter has a policy, which says nothing of what its None means.
def dtypes_of(fsdp_param: Any) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes in which a parameter is gathered, and in which its gradient is reduced."""
    policy, kept = fsdp_param.mp_policy, fsdp_param.sharded_param.dtype
    compute = policy.param_dtype or kept
    # Without a dtype of its own, since torch 2.15 a gradient is reduced in that of the parameter.
    is_newer = hasattr(policy, "param_dtype_override_fn")
    return compute, policy.reduce_dtype or (kept if is_newer else compute)


# A tensor lists its hooks to nobody.
def runs_after_accumulation(parameter: Tensor) -> bool:
    """Whether a parameter has a hook of ``register_post_accumulate_grad_hook``."""
    return bool(parameter._post_accumulate_grad_hooks)
