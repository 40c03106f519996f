"""Private and version-dependent names of torch that several rooms use.

The names of one feature alone stand beside it, in a ``private.py`` of its room:
``checkpoint/``, ``elastic/``, ``sync/fsdp/``, and those of the frameworks in ``frameworks/``.
Nothing else in the package touches a private attribute of torch, but for its compiler's in
``kernels/``. Each function says why no public way serves; the names are verified by feature, where
it is used first.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_dist.base.features import COMPILED, DDP, FLIGHT_RECORDER, ORDERED_GROUPS, is_there
from lightning_dist.base.versions import release

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.nn.parallel import DistributedDataParallel

    _Tensors = list[Tensor] | tuple[Tensor, ...]


# The scaler passes its scale to an optimizer, not to a gradient hook: get_scale() waits for a GPU.
def loss_scale_of(scaler: GradScaler | None) -> Callable[[], Tensor | None] | None:
    """Tells the factor of gradients, on the device; None from it before the first step.

    None for a scaler that is not enabled.
    """
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise ValueError(f"grad_scaler must be a torch.amp.GradScaler, got {scaler!r}; create one")
    return None if scaler is None or not scaler.is_enabled() else lambda: scaler._scale


# Tensor.copy_ is a launch for each tensor.
def copy_all(targets: _Tensors, sources: _Tensors) -> None:
    """Copy each of ``sources`` into its target, in one launch where their device can."""
    DDP.require()
    torch._foreach_copy_(targets, sources)


# Before torch 2.9 the end of a gloo group waits for its threads with the interpreter's lock, for
# which one of them waits that lets go of the tensors of its last collective.
def destroy_group(group: dist.ProcessGroup | None = None) -> None:
    """Destroy ``group``, whose last collective may just have ended; None: all groups.

    Raises:
        ValueError: it is of an earlier default group.
    """
    group = dist.group.WORLD if group is None else group
    dist.destroy_process_group(group)
    if release(torch.__version__) < (2, 9):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # its memory and threads stay


# Public functions coalesce first, which the gradient of a pass need not be.
def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor, as they are."""
    DDP.require()
    return tensor._indices(), tensor._values()


# Outputs of a model may be any collection, and torch.utils.pytree is not there yet.
def tensors_in(tree: Any) -> list[Tensor]:
    """Tensors in nested collections."""
    DDP.require()
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_tensors(call: Callable[[Tensor], Any], tree: Any) -> Any:
    """Nested collections with ``call(tensor)`` in the place of each tensor."""
    DDP.require()
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, call, tree)


# The public ways to torch's flight recorder are a signal and a file of pickles.
def flight_record() -> bytes:
    """The newest collectives of this process, as JSON; empty where torch has no such record."""
    if FLIGHT_RECORDER.missing is not None:
        return b"{}"
    from torch._C import _distributed_c10d

    record: bytes = _distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return record


# DDP says in its logging data how many hooks it has, and not which.
def communication_hooks(model: DistributedDataParallel) -> Sequence[tuple[Any, Any]]:
    """Communication hooks of a model, each with its state."""
    DDP.require()
    return model._comm_hooks


# A backward pass has no other hook at its end.
def at_end_of_backward(call: Callable[[], None]) -> None:
    """Let ``call`` run when the backward pass of now has ended, before it returns."""
    DDP.require()
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(call)


# Only the engine knows.
def is_in_backward() -> bool:
    """True if the calling thread is inside a backward pass."""
    DDP.require()
    return bool(torch._C._current_graph_task_id() != -1)


# torch has no function that says so.
def steps_in_backward(parameter: Tensor) -> bool:
    """Whether an optimizer steps in the backward pass, once a gradient is accumulated."""
    return hasattr(parameter, "_in_backward_optimizers")


# An event that is recorded while a stream is idle is past at once.
def hold_stream(module: Any, *, cycles: int) -> None:
    """Keep the current stream of a device module busy for so many cycles, on CUDA only."""
    sleep = getattr(module, "_sleep", None)
    if sleep is not None:
        sleep(cycles)


# torch.compile has no inverse.
def before_compile(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given; the model itself if it was not."""
    if "torch._dynamo" not in sys.modules:
        return model
    COMPILED.require()
    return getattr(model, "_orig_mod", model)


def name_before_compile(name: str) -> str:
    """The name of a parameter as in a checkpoint, also where a module of its path is compiled."""
    return name.replace("_orig_mod.", "")


# DDP's `_update_process_group` keeps buckets that a newcomer's DDP does not have.
def rebuild_ddp(model: Any, group: dist.ProcessGroup) -> None:
    """Let a model in DDP exchange in ``group``, with a reducer as of a new model; no collective."""
    DDP.require()
    model.reducer._remove_autograd_hooks()
    model.process_group = group
    parameters, expect_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expect_sparse, names, False)
    model._has_rebuilt_buckets = False
    hooks, model._comm_hooks = model._comm_hooks, []
    for hook, state in hooks:
        model.register_comm_hook(state, hook)


# A module has no method that says what was marked.
def names_ignored_by_ddp(module: nn.Module) -> frozenset[str]:
    """Names of parameters and buffers that DDP leaves to others, of a module in it or not yet."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


# A group does not tell how long its collectives may take.
def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Timeout of the collectives of ``group``."""
    DDP.require()
    backend = group._get_backend(group._device_types[0])
    timeout: timedelta = backend.options._timeout
    return timeout


# A group's timeout can be set when it is made, and not for its end alone.
def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let collectives of ``group`` fail after ``timeout`` from now on."""
    DDP.require()
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


# The ranks of a group have a store, of which a group does not tell.
def store_of(group: dist.ProcessGroup) -> Any:
    """The store by which the ranks of ``group`` have met."""
    DDP.require()
    from torch.distributed.distributed_c10d import _world

    _, store = _world.pg_map[group]
    return store


# It has had another name before torch 2.13, which warns since then.
def all_gather_single(
    output: Tensor, own: Tensor, *, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """``own (N,)`` of every rank -> ``output (W * N,)``."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, own, group=group, async_op=async_op)


# Before torch 2.13 a group sorts its ranks.
def new_group(
    ranks: Sequence[int] | None, *, backend: str, timeout: timedelta, **arguments: Any
) -> dist.ProcessGroup:
    """A group whose members are numbered in the order of ``ranks``. Collective, as torch's.

    With NCCL its stream comes before others: a collective that waits for the kernels of a backward
    pass to leave room ends with the pass.

    Raises:
        ImportError: this torch would number them in another order.
    """
    if is_there("torch.distributed:new_group", "sort_ranks"):
        arguments["sort_ranks"] = False
    elif ranks is not None and list(ranks) != sorted(ranks):
        ORDERED_GROUPS.require()
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # torch warns where it is another one
        arguments["pg_options"] = options
    group: dist.ProcessGroup = dist.new_group(ranks, timeout, backend, **arguments)
    return group
