"""Strategies of Fabric whose models are whole on each rank, in DDP or without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from lightning.fabric.strategies.ddp import DDPStrategy
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.elastic.recovery.member import RecoveryEnvironment
from lightning_dist.elastic.recovery.regroup import refuse_recovery
from lightning_dist.frameworks.fabric.base import SyncStrategy
from lightning_dist.frameworks.lightning.launcher import MembersEnvironment, init_process_group
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.local_updates import LocalUpdateSettings, Replicas
from lightning_dist.settings.run import RecoverySettings
from lightning_dist.settings.signatures import takes
from lightning_dist.sync.arguments import require_ddp_arguments
from lightning_dist.sync.base import Environment, Sync
from lightning_dist.sync.ddp import GradientSync
from lightning_dist.sync.local.anchor import require_replicas
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.updates import LocalSync
from lightning_dist.sync.rules import Case, check


class SyncDDPStrategy(SyncStrategy, DDPStrategy):
    """Fabric's ``DDPStrategy`` with a :class:`.Sync` in the place of DDP's own exchange."""

    @takes(ExchangeSettings)
    @takes(RecoverySettings, "recovering")
    def __init__(
        self, settings: ExchangeSettings, recovering: RecoverySettings, **kwargs: Any
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            settings: each an argument of the strategy.
            recovering: each an argument of the strategy.
            **kwargs: everything ``DDPStrategy`` takes, and so ``DistributedDataParallel``'s
                arguments.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        require_ddp_arguments(type(self), settings, kwargs)
        refuse_recovery(type(self), recovering)
        super().__init__(settings, **kwargs)
        self._backward_sync_control: Any = self

    @override
    def _environment(self, **facts: Any) -> Environment:
        return super()._environment(saves_shards=False, **facts)

    @override
    def _setup_distributed(self) -> None:
        if dist.is_initialized() and RecoveryEnvironment.from_env() is not None:
            self.cluster_environment = MembersEnvironment()
        init_process_group(self)
        super()._setup_distributed()

    @override
    def setup_module(self, module: Module) -> Any:
        self._require_room()
        environment = self._environment()
        check(Case(self._settings, module, environment=environment), at="module")
        wrapper = self.kind_of_sync().ddp_arguments(self._settings, environment, self.root_device)
        model = module
        if wrapper is not None:
            self._ddp_kwargs.update(wrapper)
            model = super().setup_module(module)
        self._attach(model, environment)
        return model

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Context of ``fabric.no_backward_sync``."""
        is_in_ddp = isinstance(module, DistributedDataParallel) and enabled
        return module.no_sync() if is_in_ddp else nullcontext()  # type: ignore[operator]

    @override
    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        stock = super().get_module_state_dict
        sync = next((candidate for candidate in self.syncs if candidate.is_of(module)), None)
        return stock(module) if sync is None else sync.weights_to_save(lambda: stock(module))


class CompressedDDPStrategy(SyncDDPStrategy):
    """Fabric's DDP with compressed gradients; arguments as the Lightning strategy of that name.

    Every module given to ``fabric.setup`` gets a reducer of its own. ``fabric.save`` stores their
    residuals under ``"lightning_dist"``; ``fabric.load`` after ``fabric.setup`` restores them.

    After ``lightning_dist.init_process_group(recovery="in_process")`` ranks are those of the
    present generation: see ``ElasticLoop(recovery="in_process")``.
    """

    @override
    def kind_of_sync(self) -> type[Sync]:
        return GradientSync


class LocalUpdateStrategy(SyncDDPStrategy):
    """Optimizer steps of every rank alone; arguments as the Lightning strategy of that name.

    One model with its optimizers. Every step of the first optimizer counts. Call
    ``strategy.updates.finish()`` after the last one; evaluate ``with
    strategy.updates.anchor_weights():``. With ``weigh_by="samples"`` call
    ``strategy.count_samples(len(batch))`` for every batch.

    ``fabric.save`` stores the anchor as the weights of the model, and the state of all workers
    under ``"lightning_dist_local_updates"``; ``fabric.load`` after ``fabric.setup`` restores both.
    """

    @takes(LocalUpdateSettings)
    def __init__(
        self, settings: LocalUpdateSettings, *, replicas: Replicas = "rank", **kwargs: Any
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            settings: each an argument of the strategy.
            replicas: a worker is a rank, or all ranks of a node with DDP between them; nodes have
                equal weight, whatever their number of ranks.
            **kwargs: see :class:`~lightning_dist.fabric.CompressedDDPStrategy`.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        require_replicas(replicas, settings)
        self._replicas: Replicas = replicas
        super().__init__(settings, **kwargs)

    @override
    def kind_of_sync(self) -> type[Sync]:
        return LocalSync

    @property
    def updates(self) -> LocalUpdates | None:
        """The outer steps; None before the model is set up."""
        first = self.syncs[0] if self.syncs else None
        return first.updates if isinstance(first, LocalSync) else None

    @override
    def setup_module(self, module: Module) -> Any:
        raise ValueError(
            "Local updates need the model together with its optimizers, got a model alone; call "
            "fabric.setup(model, optimizer)"
        )

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> Any:  # the scheduler since Lightning 2.6
        case = Case(self._settings, module, optimizers, self._environment())
        check(case, at="optimizers")
        model = super().setup_module(module)
        return model, [self.setup_optimizer(optimizer) for optimizer in optimizers], *scheduler
