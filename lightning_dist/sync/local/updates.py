"""Local steps on every worker, and an outer step on the mean of what they have changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dist.settings.local_updates import LocalUpdateSettings
from lightning_dist.settings.signatures import arguments_of, takes
from lightning_dist.sync.ddp import describe_parameters
from lightning_dist.sync.fsdp.checks import reshard
from lightning_dist.sync.in_force import show
from lightning_dist.sync.local.checks import (
    require_local,
    require_workers,
    warn_of_bursts,
)
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.shards import WorkerShards, workers_of
from lightning_dist.sync.networks import Groups, network_over
from lightning_dist.sync.rules import require_compressible, require_first
from lightning_dist.sync.trained import TrainedSet

_attached: WeakKeyDictionary[nn.Module, ref[LocalUpdates]] = WeakKeyDictionary()


@takes(LocalUpdateSettings, refuse=arguments_of(DistributedDataParallel))
def local_updates(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    settings: LocalUpdateSettings,
    *,
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
        settings: each an argument of this function.
        groups: process groups over the ranks of ``model``. None: created here.

    Raises:
        ValueError: a setting that is out of range or cannot take effect, a model or an optimizer
            that cannot step locally, or ranks whose settings differ.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return attach(model, optimizers, settings, groups=groups)


def attach(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    settings: LocalUpdateSettings,
    *,
    groups: Groups | None = None,
    silences: bool = False,
) -> LocalUpdates:
    """:func:`local_updates` with checked settings.

    Args:
        silences: a DistributedDataParallel over all ranks averages nothing from now on, where
            there are no ``ddp_steps``: a framework has wrapped the model in it.
    """
    require_local(optimizers)
    synced = model if isinstance(model, DistributedDataParallel) else None
    module = model if synced is None else synced.module
    if synced is not None and silences and not settings.ddp_steps:
        synced.require_backward_grad_sync = False
        synced = None
    require_compressible(module)
    require_first(updates_of(module), name="local_updates")
    world = dist.group.WORLD if groups is None else groups[0]
    if world is None:
        raise ValueError("Local updates need a process group; call init_process_group first")
    require_workers(module, synced, settings, world_size=world.size())
    reshard(module)  # a forward pass leaves parameters that are no shards
    inside = 1 if synced is None or settings.ddp_steps else synced.process_group.size()
    device = next(module.parameters()).device
    workers = workers_of(module, settings, groups=groups, device=device)
    network = network_over(
        world,
        settings,
        device=device,
        facts={
            "parameters": describe_parameters(module),
            **settings.outer,
            "outer optimizer": None if settings.outer_optimizer is None else "given",
            "outer schedule": None if settings.outer_schedule is None else "given",
        },
        groups=groups,
        tree=workers,
    )
    shards = None if network.intra is None or workers is None else WorkerShards(network)
    inside = inside if shards is None else shards.size
    updates = LocalUpdates(
        module,
        settings,
        optimizers=optimizers,
        network=network,
        synced=synced if settings.ddp_steps else None,
        ranks_per_worker=inside,
        shards=shards,
    )
    if synced is not None:
        updates.reducer.at_close.append(TrainedSet(synced, updates.reducer.names).close)
    _attached[module] = ref(updates)
    if network.rank == 0 and network.world_size > 1:
        if settings.outer_optimizer is None:
            warn_of_bursts(settings)
        show(lambda: _in_force(updates, ranks_per_worker=inside))
    return updates


def _in_force(updates: LocalUpdates, *, ranks_per_worker: int) -> str:
    """``local updates: diloco, an outer step every 16 steps, codec int8, ...``"""
    settings, config = updates.settings, updates.reducer.comm_config()
    every = f"every {settings.sync_every} steps"
    if settings.fragments > 1:
        every += f" in {settings.fragments} fragments"
    if settings.overlap_steps:
        every += f" with overlap_steps={settings.overlap_steps}"
    if updates.outer_scheduler is not None:
        every += f", outer schedule {type(updates.outer_scheduler).__name__}"
    if settings.ddp_steps:
        every += f", after {settings.ddp_steps} steps of plain DDP"
    size: int = config["world_size"]
    ranks = f"{ranks_per_worker} rank{'s' * (ranks_per_worker > 1)}"
    is_even = size % ranks_per_worker == 0  # nodes may have different numbers of ranks
    workers = f"{size // ranks_per_worker} workers x {ranks}" if is_even else "nodes as workers"
    how = f"{config['exchange']} exchange" if updates.shards is None else "each exchanges its shard"
    return (
        f"local updates: {settings.method}, an outer step {every}; codec "
        f"{settings.inter}, {workers}, {how}, {config['topology']}, world size "
        f"{size}"
    )


def updates_of(module: nn.Module) -> LocalUpdates | None:
    """The last updates that were attached to ``module``; None if there are none, or closed ones."""
    attached = _attached.get(module)
    updates = None if attached is None else attached()
    return None if updates is None or updates.reducer.closed else updates
