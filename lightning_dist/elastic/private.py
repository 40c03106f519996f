"""Private names of torch that restarts and recovery within the process need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_dist.base.features import LAUNCH, RECOVERY, RESTART

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


# torch's functions for it are public in name only, and none makes a group beside the default one.
def reconfigurable_group(
    backend: str, store: Any, *, number: int, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A group without members until :func:`reconfigure`; the default one if there is none yet.

    Args:
        backend: as of ``init_process_group``, such as ``"cpu:gloo,cuda:nccl"``.
        number: of this process, unlike that of every other one of the store.
        name: of the group, unlike that of every other one of this process.
        timeout: of its collectives.
    """
    RECOVERY.require()
    regime: dict[str, Any] = {"timeout": timeout, "enable_reconfigure": True}
    if not dist.is_initialized():
        dist.init_process_group(backend, store=store, rank=number, world_size=number + 1, **regime)
        world = dist.group.WORLD
        assert world is not None
        return world
    inner: Any = distributed_c10d
    made = inner._new_process_group_helper(
        *(number + 1, number, [dist.get_rank()], dist.Backend(backend), store, name),
        group_desc=name,
        **regime,
    )
    group: dist.ProcessGroup = made[0]
    return group


# dist.new_group() says that it returns it, and types say that it returns a group.
def no_member() -> Any:
    """Torch's object for a group that this process is not a member of."""
    return distributed_c10d.GroupMember.NON_GROUP_MEMBER


# A group with several backends cannot be reconfigured as a whole.
def backends_of(group: Any) -> dict[str, Any]:
    """Backends of a group, by name; one may be that of several types of devices."""
    RECOVERY.require()
    backends = [group._get_backend(device) for device in group._device_types]
    return {backend.name(): backend for backend in sorted(backends, key=lambda each: each.name())}


def is_reconfigurable(backend: Any) -> bool:
    """Whether :func:`reconfigure` can change the members of a backend."""
    return bool(getattr(getattr(backend, "options", None), "enable_reconfigure", False))


def reconfigure(backend: Any, *, uuid: int, handles: Sequence[str], timeout: timedelta) -> None:
    """Connect a backend with the members that have these handles. Collective among them.

    Args:
        uuid: unlike that of every other call with the store.
    """
    inner: Any = distributed_c10d
    options = inner.ReconfigureOptions()
    options.uuid, options.handles, options.timeout = uuid, [*handles], timeout
    backend.reconfigure(options).wait()


def set_ranks(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Set the ranks in the default group that torch keeps of the members of a group."""
    inner: Any = distributed_c10d
    inner._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}


# torch numbers the groups that a process makes, and its members find each other by that.
def number_groups_from(count: int) -> None:
    """Set the number of the next group that ``dist.new_group`` makes; equal on all members."""
    inner: Any = distributed_c10d
    inner._world.group_count = count


# DDP puts its buckets in the order of the first pass in the next forward pass, by a collective.
def order_buckets(model: DistributedDataParallel) -> None:
    """Put the buckets of a model in the order of its first backward pass, once. Collective."""
    RECOVERY.require()
    if not model._has_rebuilt_buckets and model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True


# Nobody else counts what is written to a tensor.
def version_of(tensor: Tensor) -> int:
    """A number that rises with every operation that writes to a tensor."""
    return tensor._version


# Persistent workers end when their iterator is collected, and in a circle of references it is not.
def end_persistent_workers(loader: Any) -> None:
    """End the workers that a loader keeps between epochs."""
    RESTART.require()
    iterator: Any = getattr(loader, "_iterator", None)
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None


LAST_LEARNING_RATES = "_last_lr"
"""The attribute in which schedulers keep what ``get_last_lr()`` returns, which cannot be set."""


# Composed schedulers have no public list of what they are made of.
def inner_schedulers(scheduler: Any) -> Sequence[Any]:
    """Schedulers inside a ``SequentialLR`` or ``ChainedScheduler``; empty for others."""
    RESTART.require()
    schedulers: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return schedulers


# torchrun has no option for the agent.
def replace_agent(agent: type[Any]) -> None:
    """Let ``torch.distributed.run`` use ``agent`` for its own."""
    LAUNCH.require()
    from torch.distributed.launcher import api

    api.LocalElasticAgent = agent  # type: ignore[attr-defined]


# Which options torchrun has nothing else tells.
def torchrun_parser() -> Any:
    """The parser of torchrun's command line."""
    LAUNCH.require()
    from torch.distributed.run import get_args_parser

    return get_args_parser()


# torchrun's count of restarts is not an argument of any hook.
def give_back_restart(agent: Any) -> None:
    """Let the restart that comes next not count as one of ``max_restarts``."""
    agent._remaining_restarts += 1


# Nor is the end of them.
def forgo_restarts(agent: Any) -> None:
    """Let no restart come any more."""
    agent._remaining_restarts = 0


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


# torchrun has no option for how a worker's process is started.
@contextmanager
def handlers_from(make: Callable[..., Any]) -> Iterator[None]:
    """Let torch's agent get the handlers of processes that it starts inside from ``make``."""
    LAUNCH.require()
    from torch.distributed.elastic import multiprocessing

    api: Any = multiprocessing.api
    usual = api.get_subprocess_handler
    api.get_subprocess_handler = make
    try:
        yield
    finally:
        api.get_subprocess_handler = usual
