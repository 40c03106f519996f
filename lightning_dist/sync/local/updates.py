"""Local steps on every worker, and an outer step on the mean of what they have changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from inspect import signature
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dist.codecs import Codec
from lightning_dist.settings.exchange import Settings
from lightning_dist.settings.options import unknown
from lightning_dist.sync.arguments import refuses_unknown
from lightning_dist.sync.ddp import describe_parameters
from lightning_dist.sync.fsdp.checks import reshard
from lightning_dist.sync.in_force import show
from lightning_dist.sync.local.anchor import OuterOptimizer, OuterSchedule
from lightning_dist.sync.local.checks import (
    require_differences,
    require_local,
    require_workers,
    warn_of_bursts,
)
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.settings import (
    LocalUpdateSettings,
    Method,
    Weight,
    default_codec,
)
from lightning_dist.sync.local.shards import WorkerShards, workers_of
from lightning_dist.sync.networks import Groups, network_over
from lightning_dist.sync.rules import require_compressible, require_first
from lightning_dist.sync.trained import TrainedSet

_attached: WeakKeyDictionary[nn.Module, ref[LocalUpdates]] = WeakKeyDictionary()


@refuses_unknown(DistributedDataParallel)
def local_updates(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    method: Method = "diloco",
    sync_every: int | None = None,
    fragments: int | None = None,
    overlap_steps: int | None = None,
    mixing: float | None = None,
    ddp_steps: int | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    outer_optimizer: OuterOptimizer | None = None,
    outer_schedule: OuterSchedule | None = None,
    weigh_by: Weight = "workers",
    offload: bool = False,
    codec: str | Codec | Mapping[str, Any] | None = None,
    error_feedback: bool | Literal["auto"] = "auto",
    hierarchical: bool | Literal["auto", "leader"] = "auto",
    ranks_per_node: int | None = None,
    rank_groups: Sequence[Any] | None = None,
    min_compress_numel: int | None = None,
    exchange_timeout: float | None = None,
    groups: Groups | None = None,
) -> LocalUpdates:
    """Let every rank take optimizer steps of its own, and average what they change. Collective.

    Every worker starts from the same weights, the anchor. After ``sync_every`` steps what has
    changed, the pseudo-gradient ``anchor - weights``, is averaged over the workers and given to an
    outer optimizer, which moves the anchor; the workers go on from there::

        updates = lightning_dist.local_updates(model, optimizer, method="diloco", sync_every=16)
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            updates.step()  # after every attempted step, also one that a GradScaler has skipped
        updates.finish()

    Memory: the anchor and, with momentum, the outer optimizer's state, 4 bytes per parameter each;
    a buffer of the largest fragment; the codec's residual, 4 bytes per parameter.

    Papers: ``"local_sgd"``, arXiv 1805.09767; ``"post_local_sgd"``, 1808.07217; ``"diloco"``,
    2311.08105; ``"streaming"``, 2501.18512; ``"sparseloco"``, 2508.15706.

    Args:
        model: on its device. A DistributedDataParallel over some of the ranks, such as those of a
            node, is one worker; one over all ranks needs ``ddp_steps``. So is a model that
            ``fully_shard`` has sharded over the ranks of a node; each rank exchanges its shard.
        optimizer: of the local steps, or several. Their state stays local and differs.
        method: defaults of the arguments that follow. ``"local_sgd"``: the mean of the weights;
            ``"post_local_sgd"``: after ``ddp_steps`` steps of plain DDP; ``"diloco"``: outer
            Nesterov momentum; ``"streaming"``: fragments, applied while training goes on;
            ``"sparseloco"``: the mean of the largest changes, in two bits each.
        sync_every: attempted optimizer steps between two outer steps of a parameter. None: 16; SGD
            methods 8; sparseloco 4.
        fragments: parts of the model that are exchanged in turn. None: 1; streaming 4.
        overlap_steps: steps for which an exchange runs before its mean is used; 0 waits for it.
            None: 0; streaming 3.
        mixing: weight of a worker's own parameters when the anchor has moved, 0 to 1. None: 0;
            streaming 0.5.
        ddp_steps: steps of plain DDP before the first local one. None: 0.
        outer_lr: learning rate of the outer SGD. None: 1; diloco 0.7; streaming 0.4.
        outer_momentum: Nesterov momentum of the outer SGD. None: 0; diloco 0.6; streaming 0.9.
        outer_optimizer: another one, made from the anchor's tensors, as ``lambda tensors:
            torch.optim.AdamW(tensors, lr=0.1)``. None: SGD.
        outer_schedule: learning rate scheduler, made from the outer optimizer. It steps after
            every outer step (of all fragments) but that of :meth:`~LocalUpdates.finish`. None:
            constant.
        weigh_by: weight of a worker in the mean: ``"workers"``, all the same, or ``"samples"``,
            the number of samples (or tokens) given to :meth:`~LocalUpdates.step`.
        offload: keep the anchor and the outer optimizer's state in the host's memory between outer
            steps.
        codec: codec of the pseudo-gradient, as for :func:`~lightning_dist.compress_ddp`. None:
            int8, of sparseloco its own.
        error_feedback: as for :func:`~lightning_dist.compress_ddp`, and so are the next five.
        hierarchical: reduce inside every node first.
        ranks_per_node: number of consecutive ranks on each node. None: by host name.
        rank_groups: groups of ranks instead of nodes.
        min_compress_numel: elements; smaller tensors, and 1-D ones, are uncompressed.
        exchange_timeout: seconds of one wait for other ranks, with gloo, before an outer step
            raises. None: the timeout of the process group.
        groups: process groups over the ranks of ``model``. None: created here.

    Raises:
        ValueError: a setting that is out of range or cannot take effect, a model or an optimizer
            that cannot step locally, or ranks whose settings differ.
    """
    schedule, settings = checked(
        method=method,
        sync_every=sync_every,
        fragments=fragments,
        overlap_steps=overlap_steps,
        mixing=mixing,
        ddp_steps=ddp_steps,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        outer_optimizer=outer_optimizer,
        weigh_by=weigh_by,
        offload=offload,
        codec=codec,
        error_feedback=error_feedback,
        hierarchical=hierarchical,
        ranks_per_node=ranks_per_node,
        rank_groups=rank_groups,
        min_compress_numel=min_compress_numel,
        exchange_timeout=exchange_timeout,
    )
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return attach(
        model,
        optimizers,
        schedule,
        settings,
        outer_optimizer=outer_optimizer,
        outer_schedule=outer_schedule,
        groups=groups,
    )


def checked(
    *,
    method: Method = "diloco",
    outer_optimizer: OuterOptimizer | None = None,
    codec: str | Codec | Mapping[str, Any] | None = None,
    **given: Any,
) -> tuple[LocalUpdateSettings, Settings]:
    """Settings of the outer steps and of their exchange, of the arguments of :func:`local_updates`.

    Raises:
        ValueError: a setting that does not exist or is out of range.
    """
    known = {field.name for field in fields(LocalUpdateSettings)}
    schedule = LocalUpdateSettings.check(
        method,
        outer_optimizer=outer_optimizer,
        **{name: value for name, value in given.items() if name in known},
    )
    exchange = {name: value for name, value in given.items() if name not in known}
    for name in exchange:
        if name not in signature(local_updates).parameters:
            names = tuple(signature(local_updates).parameters)[2:]
            raise ValueError(unknown(name, names, where="local_updates"))
    settings = Settings.check(
        default_codec(method) if codec is None else codec, **exchange, compile_kernels=False
    )
    require_differences(settings)
    return schedule, settings


def attach(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    schedule: LocalUpdateSettings,
    settings: Settings,
    *,
    outer_optimizer: OuterOptimizer | None = None,
    outer_schedule: OuterSchedule | None = None,
    groups: Groups | None = None,
    silences: bool = False,
) -> LocalUpdates:
    """:func:`local_updates` with checked settings.

    Args:
        silences: a DistributedDataParallel over all ranks averages nothing from now on, where
            there are no ``ddp_steps``: a framework has wrapped the model in it.
    """
    require_local(optimizers)
    require_differences(settings)
    synced = model if isinstance(model, DistributedDataParallel) else None
    module = model if synced is None else synced.module
    if synced is not None and silences and not schedule.ddp_steps:
        synced.require_backward_grad_sync = False
        synced = None
    require_compressible(module)
    require_first(updates_of(module), name="local_updates")
    world = dist.group.WORLD if groups is None else groups[0]
    if world is None:
        raise ValueError("Local updates need a process group; call init_process_group first")
    require_workers(module, synced, schedule, world_size=world.size())
    reshard(module)  # a forward pass leaves parameters that are no shards
    inside = 1 if synced is None or schedule.ddp_steps else synced.process_group.size()
    device = next(module.parameters()).device
    workers = workers_of(module, settings, groups=groups, device=device)
    network = network_over(
        world,
        settings,
        device=device,
        facts={
            "parameters": describe_parameters(module),
            **asdict(schedule),
            "outer optimizer": None if outer_optimizer is None else "given",
            "outer schedule": None if outer_schedule is None else "given",
        },
        groups=groups,
        tree=workers,
    )
    shards = None if network.intra is None or workers is None else WorkerShards(network)
    inside = inside if shards is None else shards.size
    updates = LocalUpdates(
        module,
        schedule,
        optimizers=optimizers,
        settings=settings,
        network=network,
        outer_optimizer=outer_optimizer,
        outer_schedule=outer_schedule,
        synced=synced if schedule.ddp_steps else None,
        ranks_per_worker=inside,
        shards=shards,
    )
    if synced is not None:
        updates.reducer.at_close.append(TrainedSet(synced, updates.reducer.names).close)
    _attached[module] = ref(updates)
    if network.rank == 0 and network.world_size > 1:
        if outer_optimizer is None:
            warn_of_bursts(settings, schedule)
        show(lambda: _in_force(updates, ranks_per_worker=inside))
    return updates


def _in_force(updates: LocalUpdates, *, ranks_per_worker: int) -> str:
    """``local updates: diloco, an outer step every 16 steps, codec int8, ...``"""
    schedule, config = updates.schedule, updates.reducer.comm_config()
    every = f"every {schedule.sync_every} steps"
    if schedule.fragments > 1:
        every += f" in {schedule.fragments} fragments"
    if schedule.overlap_steps:
        every += f" with overlap_steps={schedule.overlap_steps}"
    if updates.outer_scheduler is not None:
        every += f", outer schedule {type(updates.outer_scheduler).__name__}"
    if schedule.ddp_steps:
        every += f", after {schedule.ddp_steps} steps of plain DDP"
    size: int = config["world_size"]
    ranks = f"{ranks_per_worker} rank{'s' * (ranks_per_worker > 1)}"
    is_even = size % ranks_per_worker == 0  # nodes may have different numbers of ranks
    workers = f"{size // ranks_per_worker} workers x {ranks}" if is_even else "nodes as workers"
    how = f"{config['exchange']} exchange" if updates.shards is None else "each exchanges its shard"
    return (
        f"local updates: {schedule.method}, an outer step {every}; codec "
        f"{updates.reducer.settings.codec}, {workers}, {how}, {config['topology']}, world size "
        f"{size}"
    )


def updates_of(module: nn.Module) -> LocalUpdates | None:
    """The last updates that were attached to ``module``; None if there are none, or closed ones."""
    attached = _attached.get(module)
    updates = None if attached is None else attached()
    return None if updates is None or updates.reducer.closed else updates
