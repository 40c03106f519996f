"""Private and undocumented names of torch, and how such names of any framework are checked.

Nothing else in the package touches a private attribute of torch, but for its compiler's in
``kernels/``;
Lightning's are in ``integrations/lightning/private.py``, those of Accelerate and transformers in
``integrations/accelerate/private.py``. Each has tables of the names that it uses, which are
verified once, where they are used first: a release that has dropped one fails by name at once.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    _Tensors = list[Tensor] | tuple[Tensor, ...]

Table = Mapping[str, str]
"""Names, with spaces between them, by their owner, ``"module"`` or ``"module:Class"``."""

NAMES: Table = {
    "torch": "_foreach_copy_",
    "torch._C": "_current_graph_task_id",
    "torch:Tensor": "_indices _values _version",
    "torch:UntypedStorage": "_cdata _checkpoint_offset",
    "torch.cuda": "_sleep",
    "torch.storage:TypedStorage": "_pickle_storage_type _size _untyped_storage",
    "torch.serialization": "location_tag normalize_storage_type",
    "torch.utils._pytree": "tree_leaves tree_map_only",
    "torch.autograd:Variable": "_execution_engine",
    "torch.amp.grad_scaler:GradScaler": "_scale",
    "torch.nn:Module": "_load_from_state_dict _load_state_dict_pre_hooks",
    "torch.nn.parallel:DistributedDataParallel": (
        "_comm_hooks broadcast_bucket_size bucket_bytes_cap find_unused_parameters "
        "forward_sync_buffers is_multi_device_module parameters_to_ignore "
        "require_backward_grad_sync static_graph"
    ),
    "torch.optim.lr_scheduler:LRScheduler": "_last_lr",
    "torch.optim.lr_scheduler:SequentialLR": "_schedulers",
    "torch.utils.data:DataLoader": "_iterator",
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter": "_shutdown_workers",
    "torch.distributed.distributed_c10d": "_set_pg_timeout _world",
    "torch.distributed:ProcessGroup": "_device_types _get_backend",
    "torch._C._distributed_c10d": "_dump_fr_trace_json",
}
REGROUPED: Table = {
    "torch.nn.parallel:DistributedDataParallel": (
        "_build_params_for_reducer _build_debug_param_to_name_mapping _ddp_init_helper "
        "_has_rebuilt_buckets _comm_hooks"
    ),
    "torch.distributed:Reducer": "_remove_autograd_hooks _rebuild_buckets",
    "torch.distributed": "_broadcast_coalesced",
}
"""Names of DDP for which its group is exchanged."""
AGENT: Table = {
    "torch.distributed.launcher.api": "LocalElasticAgent",
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent": (
        "_exit_barrier _monitor_workers _pcontext _remaining_restarts _rendezvous "
        "_set_local_rank_env _shutdown _worker_group"
    ),
    "torch.distributed.elastic.multiprocessing.api:SubprocessContext": "subprocess_handlers",
    "torch.distributed.elastic.multiprocessing.subprocess_handler:SubprocessHandler": (
        "_popen _stderr _stdout"
    ),
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler": "_store",
    "torch.distributed.run": "get_args_parser",
}
"""Names of torchrun."""
FSDP: Table = {
    "torch.distributed.fsdp:FSDPModule": "_get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": "_fsdp_param_groups",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": (
        "fsdp_params mesh_info mp_policy offload_policy reduce_grads _is_hsdp _all_gather_comm "
        "_reduce_scatter_comm device gradient_divide_factor force_sum_reduction_for_comms"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": "_get_gradient_divide_factors",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": (
        "sharded_param padded_sharded_param_size fsdp_placement _orig_size"
    ),
    "torch:Tensor": "_post_accumulate_grad_hooks",
}
"""Names of ``fully_shard``, which only models that it has sharded need."""
DTENSOR: Table = {"torch.distributed.tensor:DTensor": "__create_chunk_list__"}
"""Names that only checkpoints of sharded tensors need."""
COMPILED: Table = {"torch._dynamo.eval_frame:OptimizedModule": "_orig_mod"}
"""Names that only torch.compile brings, which takes long to import."""

_STORES = ("STORE_ATTR", "LOAD_CONST")
"""Instructions of ``self.name = ...``, and of ``super().__setattr__("name", ...)``."""
_verified: set[int] = set()


def require_names(package: str, table: Table) -> None:
    """Verify that an installed package has the names of a table; once for each table.

    Raises:
        ImportError: one is missing, with its name and the versions that are admitted.
    """
    if id(table) in _verified:
        return
    for owner, names in table.items():
        for name in names.split():
            if not is_there(owner, name):
                where = owner.replace(":", ".")
                raise ImportError(
                    f"{package} {_installed(package)} has no {where}.{name}, which lightning_dist "
                    f"uses; install {_admitted(package)}"
                )
    _verified.add(id(table))


def is_there(owner: str, name: str) -> bool:
    """Whether a module or class has ``name``, declares it, or a method of the class sets it."""
    module, _, of_class = owner.partition(":")
    try:
        found = import_module(module)
        kind = getattr(found, of_class) if of_class else found
    except (ImportError, AttributeError):
        return False
    if hasattr(kind, name) or not isinstance(kind, type):
        return hasattr(kind, name)
    # A compiled backward pass replaces Module.__init__.
    return any(
        name in vars(base).get("__annotations__", {})
        or any(_sets(each, name) for each in vars(base).values())
        for base in kind.__mro__
    )


def _sets(method: Any, name: str) -> bool:
    function = inspect.unwrap(method) if inspect.isfunction(method) else None
    if not inspect.isfunction(function):  # one wrapped by another may be C's
        return False
    if name not in (*function.__code__.co_names, *function.__code__.co_consts):
        return False
    stores = _STORES if function.__name__ == "__init__" else _STORES[:1]
    code = dis.get_instructions(function)
    return any(each.argval == name and each.opname in stores for each in code)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _admitted(package: str) -> str:
    """The requirement of this package, as in ``torch<2.14,>=2.13``."""
    for each in requires("lightning-dist") or ():
        requirement = each.partition(";")[0].strip()
        if requirement.startswith(package) and not requirement[len(package)].isalnum():
            return requirement
    return f"another version of {package}"


def require_torch() -> None:
    """Verify :data:`NAMES`."""
    require_names("torch", NAMES)


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
    require_torch()
    torch._foreach_copy_(targets, sources)


# Public functions coalesce first, which the gradient of a pass need not be.
def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor, as they are."""
    require_torch()
    return tensor._indices(), tensor._values()


# Autograd counts changes in place, and says so nowhere else.
def version_of(tensor: Tensor) -> int:
    """Number of changes in place of a tensor and its views."""
    require_torch()
    return tensor._version


# torch.save leaves no way to write the bytes of storages later than their pickle.
def describe_storage(storage: Any) -> tuple[torch.UntypedStorage, torch.dtype, Any, int]:
    """Memory of a storage; dtype, legacy class and number of its elements, as torch.save has it."""
    require_torch()
    from torch.serialization import normalize_storage_type

    if isinstance(storage, torch.storage.TypedStorage):
        kind = getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call]
        numel = storage._size()  # type: ignore[no-untyped-call]
        return storage._untyped_storage, storage.dtype, kind, numel
    kind = normalize_storage_type(type(storage))  # type: ignore[no-untyped-call]
    return storage, torch.uint8, kind, storage.nbytes()


def location_of(storage: Any) -> str:
    """Name of the device of a storage, as in a checkpoint."""
    require_torch()
    from torch.serialization import location_tag

    return str(location_tag(storage))


def identity_of(storage: torch.UntypedStorage) -> int:
    """A number that storages have in common if they are one."""
    identity: int = storage._cdata
    return identity


# Outputs of a model may be any collection, and torch.utils.pytree is not there yet.
def tensors_in(tree: Any) -> list[Tensor]:
    """Tensors in nested collections."""
    require_torch()
    from torch.utils._pytree import tree_leaves

    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def map_tensors(call: Callable[[Tensor], Any], tree: Any) -> Any:
    """Nested collections with ``call(tensor)`` in the place of each tensor."""
    require_torch()
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, call, tree)


# The public ways to torch's flight recorder are a signal and a file of pickles.
def flight_record() -> bytes:
    """The newest collectives of this process, as JSON."""
    require_torch()
    from torch._C import _distributed_c10d

    record: bytes = _distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return record


# DDP says in its logging data how many hooks it has, and not which.
def communication_hooks(model: DistributedDataParallel) -> Sequence[tuple[Any, Any]]:
    """Communication hooks of a model, each with its state."""
    require_torch()
    return model._comm_hooks


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


# There is no way to ask a module what it does before it loads.
def loads_by_itself(module: nn.Module) -> bool:
    """Whether a module has a say in what it loads: a hook, or a method of its own."""
    require_torch()
    methods = (getattr(type(module), name) for name in ("load_state_dict", "_load_from_state_dict"))
    of_torch = (str(getattr(each, "__module__", "")).partition(".")[0] for each in methods)
    return bool(module._load_state_dict_pre_hooks) or any(each != "torch" for each in of_torch)


# torch.compile has no inverse.
def before_compile(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given; the model itself if it was not."""
    if "torch._dynamo" not in sys.modules:
        return model
    require_names("torch", COMPILED)
    return getattr(model, "_orig_mod", model)


def name_before_compile(name: str) -> str:
    """The name of a parameter as in a checkpoint, also where a module of its path is compiled."""
    return name.replace("_orig_mod.", "")


# DDP's `_update_process_group` keeps buckets that a newcomer's DDP does not have.
def rebuild_ddp(model: Any, group: dist.ProcessGroup) -> None:
    """Let a model in DDP exchange in ``group``, with a reducer as of a new model; no collective."""
    require_names("torch", REGROUPED)
    model.reducer._remove_autograd_hooks()
    model.process_group = group
    parameters, expect_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expect_sparse, names, False)
    model._has_rebuilt_buckets = False
    hooks, model._comm_hooks = model._comm_hooks, []
    for hook, state in hooks:
        model.register_comm_hook(state, hook)


# DDP puts its buckets in the order of the first pass in the next forward pass, by a collective.
def order_buckets(model: DistributedDataParallel) -> None:
    """Put the buckets of a model in the order of its first backward pass, once. Collective."""
    require_names("torch", REGROUPED)
    if not model._has_rebuilt_buckets and model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True


# A module has no method that says what was marked.
def names_ignored_by_ddp(module: nn.Module) -> frozenset[str]:
    """Names of parameters and buffers that DDP leaves to others, of a module in it or not yet."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


# DDP sends buffers within its forward pass only.
def send_buffers(model: DistributedDataParallel) -> None:
    """Buffers of rank 0 -> all, as DDP does before a forward pass. Collective."""
    require_names("torch", REGROUPED)
    import torch.distributed as dist

    ignored = model.parameters_to_ignore
    named = model.module.named_buffers()
    buffers = [buffer for name, buffer in named if name not in ignored]
    if buffers:
        size = model.broadcast_bucket_size
        dist._broadcast_coalesced(  # type: ignore[attr-defined]  # torch re-exports it silently
            model.process_group, buffers, size, 0
        )


# A group does not tell how long its collectives may take.
def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Timeout of the collectives of ``group``."""
    require_torch()
    backend = group._get_backend(group._device_types[0])
    timeout: timedelta = backend.options._timeout
    return timeout


# A group's timeout can be set when it is made, and not for its end alone.
def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let collectives of ``group`` fail after ``timeout`` from now on."""
    require_torch()
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


# Whoever leaves all groups behind has to know them, and torch lists them to itself only.
def all_groups() -> list[dist.ProcessGroup]:
    """The default process group of this process, and all that were made after it."""
    require_torch()
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


# The ranks of a group have a store, of which a group does not tell.
def store_of(group: dist.ProcessGroup) -> Any:
    """The store by which the ranks of ``group`` have met."""
    require_torch()
    from torch.distributed.distributed_c10d import _world

    _, store = _world.pg_map[group]
    return store


# torch numbers groups, by which members find each other, also one that could not be made.
def forget_group_numbers() -> None:
    """Number process groups from 0 again, where there are none."""
    require_torch()
    from torch.distributed.distributed_c10d import _world

    _world.group_count = 0


# Persistent workers end when their iterator is collected, and in a circle of references it is not.
def end_persistent_workers(loader: Any) -> None:
    """End the workers that a loader keeps between epochs."""
    require_torch()
    iterator: Any = getattr(loader, "_iterator", None)
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None


LAST_LEARNING_RATES = "_last_lr"
"""Where schedulers keep what ``get_last_lr()`` returns, which cannot be set."""


# Composed schedulers have no public list of what they are made of.
def inner_schedulers(scheduler: Any) -> Sequence[Any]:
    """Schedulers inside a ``SequentialLR`` or ``ChainedScheduler``; empty for others."""
    require_torch()
    found: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return found


# FSDP tells nobody in which order parameters lie in the gradients that it reduces.
def parameter_groups_of(module: FSDPModule) -> Sequence[Any]:
    """Parameter groups that ``fully_shard`` has made of ``module``."""
    require_names("torch", FSDP)
    groups: Sequence[Any] = module._get_fsdp_state()._fsdp_param_groups
    return groups


def averages_replicas(group: Any) -> bool:
    """Whether a parameter group is averaged over a second dimension of its mesh."""
    found: bool = group._is_hsdp
    return found


# `set_requires_gradient_sync` says nothing of what was set.
def reduces_gradients(group: Any) -> bool:
    """Whether a parameter group reduces its gradients in the next backward pass."""
    found: bool = group.reduce_grads
    return found


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
    found: dist.ProcessGroup = group.mesh_info.shard_process_group
    return found


def size_before_sharding(fsdp_param: Any) -> Sequence[int]:
    """The shape that ``fully_shard`` has sharded: with tensor parallelism that of this rank."""
    found: Sequence[int] = fsdp_param._orig_size
    return found


# What torch's own checkpoints ask: offsets follow from the order of shards as well.
def chunk_of(tensor: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """First index and size of this rank's part of a sharded tensor, in every dimension."""
    require_names("torch", DTENSOR)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return chunk.offsets, chunk.sizes


# Documented for tensors loaded under FakeTensorMode; there is no other way to read a part of one.
def offset_in_file(tensor: Tensor) -> int:
    """Offset in its file of the storage of a tensor that was loaded onto ``"meta"``."""
    require_torch()
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


# A backward pass has no other hook at its end.
def at_end_of_backward(call: Callable[[], None]) -> None:
    """Let ``call`` run when the backward pass of now has ended, before it returns."""
    require_torch()
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(call)


# Only the engine knows.
def is_in_backward() -> bool:
    """True if the calling thread is inside a backward pass."""
    require_torch()
    return bool(torch._C._current_graph_task_id() != -1)


# A tensor lists its hooks to nobody.
def runs_after_accumulation(parameter: Tensor) -> bool:
    """Whether a parameter has a hook of ``register_post_accumulate_grad_hook``."""
    return bool(parameter._post_accumulate_grad_hooks)


# torchrun has no option for the agent.
def replace_agent(agent: type[Any]) -> None:
    """Let ``torch.distributed.run`` use ``agent`` for its own."""
    require_names("torch", AGENT)
    from torch.distributed.launcher import api

    api.LocalElasticAgent = agent  # type: ignore[attr-defined]


# Which options torchrun has nothing else tells.
def torchrun_parser() -> Any:
    """The parser of torchrun's command line."""
    require_names("torch", AGENT)
    from torch.distributed.run import get_args_parser

    return get_args_parser()


# torchrun's count of restarts is not an argument of any hook.
def give_back_restart(agent: Any) -> None:
    """Let the restart that comes next not count as one of ``max_restarts``."""
    agent._remaining_restarts += 1


# A handler closes its files only where there is a process that it can signal.
def close_output(handler: Any) -> None:
    """Close the files into which a process of torchrun has written, if there are any."""
    for file in (handler._stdout, handler._stderr):
        if file is not None:
            file.close()


# A rendezvous gives away its store only under a prefix, and to nodes that have been admitted.
def store_of_rendezvous(handler: Any) -> Any:
    """The store of a rendezvous whose nodes may change."""
    return handler._store
