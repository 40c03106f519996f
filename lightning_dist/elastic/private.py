"""Private names of torch that restarts and recovery within the process need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_dist.base.features import LAUNCH, RECOVERY, RESTART

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


# torch's functions for it are public in name only, and none makes a group beside the default one.
def reconfigurable_group(
    store: Any, *, number: int, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A gloo group whose members :func:`reconfigure` says; the default one if there is none.

    Args:
        number: of this process, unlike that of every other one of the store.
        name: of the group, unlike that of every other one of this process.
        timeout: of its collectives.
    """
    RECOVERY.require()
    regime: dict[str, Any] = {"timeout": timeout, "enable_reconfigure": True}
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=store, rank=number, world_size=number + 1, **regime)
        world = dist.group.WORLD
        assert world is not None
        return world
    inner: Any = distributed_c10d
    made = inner._new_process_group_helper(
        *(number + 1, number, [dist.get_rank()], dist.Backend("gloo"), store, name),
        group_desc=name,
        **regime,
    )
    group: dist.ProcessGroup = made[0]
    return group


# dist.new_group() says that it returns it, and types say that it returns a group.
def no_member() -> Any:
    """What torch gives to those that are not in a group."""
    return distributed_c10d.GroupMember.NON_GROUP_MEMBER


def is_reconfigurable(group: Any) -> bool:
    """Whether a group was made for other members to come."""
    RECOVERY.require()
    options = group._get_backend(torch.device("cpu")).options
    return bool(getattr(options, "enable_reconfigure", False))


def handle_of(group: Any) -> str:
    """The text by which others find this process in a group, until it is reconfigured."""
    RECOVERY.require()
    handle: str = group.get_reconfigure_handle()
    return handle


def reconfigure(
    group: dist.ProcessGroup,
    *,
    uuid: int,
    handles: Sequence[str],
    ranks: Sequence[int],
    timeout: timedelta,
) -> None:
    """Let a group have the members with these handles. Collective among them.

    Collectives that are under way in it fail, but for those that wait for a process that is stopped
    or cut off.

    Args:
        uuid: unlike that of every other call with the store.
        ranks: of the members in the default group.
    """
    RECOVERY.require()
    inner: Any = distributed_c10d
    inner._reconfigure(uuid=uuid, handles=[*handles], group=group, timeout=timeout).wait()
    inner._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}


# DDP puts its buckets in the order of the first pass in the next forward pass, by a collective.
def order_buckets(model: DistributedDataParallel) -> None:
    """Put the buckets of a model in the order of its first backward pass, once. Collective."""
    RECOVERY.require()
    if not model._has_rebuilt_buckets and model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True


# DDP sends buffers within its forward pass only.
def send_buffers(model: DistributedDataParallel) -> None:
    """Buffers of rank 0 -> all, as DDP does before a forward pass. Collective."""
    RECOVERY.require()
    ignored = model.parameters_to_ignore
    named = model.module.named_buffers()
    buffers = [buffer for name, buffer in named if name not in ignored]
    if buffers:
        size = model.broadcast_bucket_size
        dist._broadcast_coalesced(  # type: ignore[attr-defined]  # torch re-exports it silently
            model.process_group, buffers, size, 0
        )


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
