"""Local steps on every worker, and an outer step on the mean of what they have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.base.log import get_logger
from lightning_dist.base.private import map_tensors
from lightning_dist.ranks.facts import Read, Spread, run_of
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.local_updates import LocalUpdateSettings
from lightning_dist.settings.signatures import arguments_of, takes
from lightning_dist.sync.base import Environment, Groups, Sync, remember, sync_of
from lightning_dist.sync.buckets import TrainedSet
from lightning_dist.sync.ddp import describe_parameters
from lightning_dist.sync.effect import show
from lightning_dist.sync.fsdp.checks import reshard
from lightning_dist.sync.local.anchor import warn_of_bursts
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.state import WorkerStates
from lightning_dist.sync.local.worker_shards import WorkerShards, workers_of
from lightning_dist.sync.networks import network_over, node_group
from lightning_dist.sync.rules import Case, check

log = get_logger(__name__)


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
    environment = Environment(groups=groups)
    check(Case(settings, model, optimizers, environment), at="optimizers")
    sync = LocalSync.attach(model, settings, environment)
    sync.connect(optimizers, environment)
    return sync.updates


class LocalSync(Sync):
    """Lets workers take optimizer steps of their own, and averages what they change."""

    key: ClassVar[str] = "lightning_dist_local_updates"
    entry: ClassVar[str] = "local_updates"
    of_one_model: ClassVar[bool] = True
    is_own_object: ClassVar[bool] = True
    continues: ClassVar[bool] = False
    loads_scaler: ClassVar[bool] = True
    settings: LocalUpdateSettings
    reducer: Reducer

    def __init__(self, updates: LocalUpdates) -> None:
        self.updates, self.settings, self.reducer = updates, updates.settings, updates.reducer
        self.counts_samples = self.settings.weigh_by == "samples"
        self._is_sharded = any(isinstance(child, FSDPModule) for child in updates.module.modules())
        self._hooked: WeakSet[Optimizer] = WeakSet()
        self._states: WorkerStates | None = None
        self._samples: float | None = None
        updates.sync = self

    @classmethod
    @override
    def ddp_arguments(
        cls, settings: LocalUpdateSettings, environment: Environment, device: torch.device
    ) -> Mapping[str, Any] | None:
        if environment.replicas == "node":
            assert dist.group.WORLD is not None
            return {"process_group": node_group(dist.group.WORLD, settings, device=device)}
        return {} if settings.ddp_steps else None

    @classmethod
    @override
    def attach(
        cls, model: nn.Module, settings: LocalUpdateSettings, environment: Environment
    ) -> Self:
        groups = environment.groups
        world = dist.group.WORLD if groups is None else groups[0]
        if world is None:
            raise ValueError("Local updates need a process group; call init_process_group first")
        case = Case(
            settings,
            model,
            environment=environment,
            attached=sync_of(model, cls),
            world_size=world.size(),
        )
        check(case, at="module")
        check(case, at="model")
        synced, module = case.ddp, case.module
        is_over_all = synced is not None and synced.process_group.size() == world.size()
        if synced is not None and environment.wraps and is_over_all and not settings.ddp_steps:
            synced.require_backward_grad_sync = False
            synced = None
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
            network=network,
            synced=synced if settings.ddp_steps else None,
            ranks_per_worker=inside,
            shards=shards,
        )
        if synced is not None:
            updates.reducer.at_close.append(TrainedSet(synced, updates.reducer.names).close)
        updates.is_in_ddp = case.ddp is not None
        sync = cls(updates)
        remember(module, sync)
        if network.rank == 0 and network.world_size > 1:
            if settings.outer_optimizer is None:
                warn_of_bursts(settings)
            show(lambda: _effective_settings(updates, ranks_per_worker=inside))
        return sync

    @override
    def connect(self, optimizers: Sequence[Optimizer], environment: Environment) -> None:
        """Take the optimizers whose states are saved; those of the model take the local steps."""
        case = Case(self.settings, self.model, optimizers, environment, parameters=self.names)
        check(case, at="optimizers")
        super().connect(optimizers, environment)
        for optimizer in optimizers:
            if optimizer not in self._hooked and self.trains(optimizer):
                self._hooked.add(optimizer)
                self.updates.connect(optimizer)
        scaler = environment.grad_scaler
        self._states = WorkerStates(self.updates, list(optimizers), scaler=scaler)

    @property
    @override
    def model(self) -> nn.Module:
        return self.updates.module

    @override
    def comm_config(self) -> dict[str, Any]:
        return {**self.reducer.comm_config(), "local_updates": self.settings.outer}

    @override
    def metrics(self) -> Mapping[str, float]:
        return self.updates.metrics()

    @override
    def expect_steps(self, steps: int | None, *, done: int, is_trial: bool) -> None:
        """The last step of a known number is followed by the mean of the workers."""
        if is_trial or steps is None:
            return
        self.updates.total_steps = steps
        if done:
            return
        check(Case(self.settings, steps=steps), at="steps")
        few = self.settings.few(steps - self.settings.ddp_steps)
        if few and self.reducer.network.rank == 0:
            log.warning("%s", few)

    @override
    def count_samples(self, samples: float) -> None:
        self._samples = (self._samples or 0.0) + samples

    @override
    def step_done(self) -> None:
        samples, self._samples = self._samples, None
        if samples is None and self.counts_samples:
            raise ValueError(
                "weigh_by='samples' needs the number of samples; call "
                "strategy.count_samples(len(batch)) before the optimizer's step"
            )
        self.updates.step(samples)

    @override
    def finish(self) -> None:
        self.updates.finish()

    @override
    def shared_weights(self) -> AbstractContextManager[None]:
        return self.updates.anchor_weights()

    @override
    def weights_to_save(
        self, gather: Callable[[], dict[str, Any]], *, leaves_shards: bool = True
    ) -> dict[str, Any]:
        if leaves_shards or not self._is_sharded:
            return self.updates.anchor_state_dict()
        with self.updates.anchor_weights():
            # On a CPU they are the parameters themselves.
            copied: dict[str, Any] = map_tensors(lambda tensor: tensor.detach().clone(), gather())
        return copied

    @property
    @override
    def saves_optimizers(self) -> bool:
        return self._states is None or self._states.is_of_first

    @override
    def optimizer_states_in(self, state: Mapping[str, Any]) -> list[Any] | None:
        states: list[Any] = state["workers"][0]["optimizer_states"]
        return states

    @override
    def state_dict(self, *, to: int = 0) -> dict[str, Any] | None:
        """State of all workers on rank ``to``; nothing before :meth:`connect`."""
        return None if self._states is None else self._states.state_dict(to=to)

    @override
    def spread_state_dict(self) -> tuple[dict[str, Any], list[Spread]]:
        assert self._states is not None, "optimizers are connected"
        return self._states.spread_state_dict()

    @override
    def own_state(self, state: Mapping[str, Any], *, read: Read = run_of) -> Mapping[str, Any]:
        return {} if self._states is None else self._states.own_state(state, read=read)

    @override
    def load_own_state(self, state: Mapping[str, Any] | None) -> None:
        if state is None or self._states is None:  # of another strategy, or without optimizers
            self.updates.anchor_from_weights()
        else:
            self._states.load_own_state(state)


def _effective_settings(updates: LocalUpdates, *, ranks_per_worker: int) -> str:
    """``local updates: diloco, an outer step every 16 steps, codec int8, ...``"""
    settings, config = updates.settings, updates.reducer.comm_config()
    when = f"every {settings.sync_every} steps"
    if settings.fragments > 1:
        when += f" in {settings.fragments} fragments"
    if settings.overlap_steps:
        when += f" with overlap_steps={settings.overlap_steps}"
    if updates.outer_scheduler is not None:
        when += f", outer schedule {type(updates.outer_scheduler).__name__}"
    if settings.ddp_steps:
        when += f", after {settings.ddp_steps} steps of plain DDP"
    size: int = config["world_size"]
    ranks = f"{ranks_per_worker} rank{'s' * (ranks_per_worker > 1)}"
    is_even = size % ranks_per_worker == 0  # nodes may have different numbers of ranks
    workers = f"{size // ranks_per_worker} workers x {ranks}" if is_even else "nodes as workers"
    how = f"{config['exchange']} exchange" if updates.shards is None else "each exchanges its shard"
    return (
        f"local updates: {settings.method}, an outer step {when}; codec "
        f"{settings.inter}, {workers}, {how}, {config['topology']}, world size "
        f"{size}"
    )
