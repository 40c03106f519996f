"""Strategies of Fabric whose models are sharded inside of every node by ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.frameworks.fabric.base import SyncStrategy, second_model
from lightning_dist.frameworks.lightning.launcher import init_process_group
from lightning_dist.settings.exchange import ExchangeSettings, MeshSettings, ShardedSettings
from lightning_dist.settings.local_updates import Replicas, ShardedLocalUpdateSettings
from lightning_dist.settings.signatures import takes
from lightning_dist.sync.arguments import require_sharded_arguments
from lightning_dist.sync.base import Environment, Sync
from lightning_dist.sync.fsdp.replicas import kind_of
from lightning_dist.sync.local.anchor import require_shards_as_workers
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.updates import LocalSync
from lightning_dist.sync.networks import (
    exchange_mesh,
    replicated_mesh,
    require_sizes,
    sampler_arguments,
)
from lightning_dist.sync.rules import Case, check


class SyncModelParallelStrategy(SyncStrategy, ModelParallelStrategy):
    """Fabric's ``ModelParallelStrategy`` with a mesh of several nodes and a :class:`.Sync`."""

    @takes(MeshSettings, "sizes")
    def __init__(self, settings: ExchangeSettings, sizes: MeshSettings, **kwargs: Any) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            settings: of the exchange between replicas, or of the collectives of one.
            sizes: each an argument of the strategy.
            **kwargs: everything else that ``ModelParallelStrategy`` takes.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        require_sharded_arguments(type(self), settings, kwargs)
        require_sizes(settings, sizes)
        self._sizes = sizes
        super().__init__(settings, **kwargs)
        self._backward_sync_control: Any = self

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return sampler_arguments(self.device_mesh)

    @override
    def _setup_distributed(self) -> None:
        init_process_group(self)
        super()._setup_distributed()

    @override
    def setup_environment(self) -> None:
        # Not that of ModelParallelStrategy, whose mesh has no replicas.
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._device_mesh = replicated_mesh(self._settings, self._sizes, device=self.root_device)

    @override
    def _environment(self, **facts: Any) -> Environment:
        mesh = exchange_mesh(self._settings, self.device_mesh)
        return super()._environment(mesh=mesh, **facts)

    @override
    def setup_module(self, module: Module) -> Module:
        self._require_room()
        environment = self._environment()
        model = super().setup_module(module)
        if environment.mesh is not None:
            self._attach(model, environment)
        return model

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Context of ``fabric.no_backward_sync``."""
        found = (sync.no_sync() for sync in self.syncs if sync.is_of(module) and enabled)
        return next(found, nullcontext())

    @override
    def _saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        saved = super()._saved(state)
        if self._save_distributed_checkpoint and not all(s.saves_optimizers for s in self.syncs):
            # Not a mixture of the workers' optimizers.
            saved = {k: each for k, each in saved.items() if not isinstance(each, Optimizer)}
        return saved

    @override
    def _saving(self) -> AbstractContextManager[None]:
        first = self.syncs[0] if self.kind_of_sync().of_one_model and self.syncs else None
        return nullcontext() if first is None else first.shared_weights()


class CompressedModelParallelStrategy(SyncModelParallelStrategy):
    """Fabric's model parallelism with compressed gradients between replicas.

    ``parallelize_fn(module, device_mesh)`` calls ``fully_shard`` with
    ``device_mesh["data_parallel"]``; the other arguments are as of the Lightning strategy of that
    name. Under ``fabric.no_backward_sync`` nothing is sent between replicas, and gradients stay
    sharded. ``fabric.save`` stores residuals under ``"lightning_dist"``; ``fabric.load`` after
    ``fabric.setup`` restores them.
    """

    @takes(ShardedSettings)
    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Module],
        settings: ShardedSettings,
        **kwargs: Any,
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            parallelize_fn: shards a module.
            settings: each an argument of the strategy.
            **kwargs: see :class:`.SyncModelParallelStrategy`, and everything else that
                ``ModelParallelStrategy`` takes.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        super().__init__(settings, parallelize_fn=parallelize_fn, **kwargs)

    @override
    def kind_of_sync(self) -> type[Sync]:
        assert isinstance(self._settings, ShardedSettings)
        return kind_of(self._settings)


class LocalUpdateModelParallelStrategy(SyncModelParallelStrategy):
    """Fabric's model parallelism inside nodes, and outer steps between them.

    ``parallelize_fn(module, device_mesh)`` calls ``fully_shard`` with
    ``device_mesh["data_parallel"]``; the other arguments are as of the Lightning strategy of that
    name. One model and one optimizer, made from the parameters of the sharded model::

        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

    All else is as of Fabric's :class:`~lightning_dist.fabric.LocalUpdateStrategy`.
    """

    @takes(ShardedLocalUpdateSettings)
    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Module],
        settings: ShardedLocalUpdateSettings,
        *,
        replicas: Replicas = "rank",
        **kwargs: Any,
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            parallelize_fn: shards a module.
            settings: each an argument of the strategy.
            replicas: must be ``"rank"``: all ranks of a node are one worker.
            **kwargs: see :class:`.SyncModelParallelStrategy`, whose replicas are the workers, and
                everything else that ``ModelParallelStrategy`` takes.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        require_shards_as_workers(replicas)
        self._waiting: Module | None = None
        super().__init__(settings, parallelize_fn=parallelize_fn, **kwargs)

    @override
    def kind_of_sync(self) -> type[Sync]:
        return LocalSync

    @property
    def updates(self) -> LocalUpdates | None:
        """The outer steps; None before the model is set up."""
        first = self.syncs[0] if self.syncs else None
        return first.updates if isinstance(first, LocalSync) else None

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> Any:
        raise ValueError(
            "fully_shard replaces parameters, and got an optimizer that was made before; call "
            "fabric.setup_module(model), make the optimizer of model.parameters(), and call "
            "fabric.setup_optimizers(optimizer)"
        )

    @override
    def _attach(self, model: Module, environment: Environment) -> None:
        self._waiting = model  # for its optimizer: weights may be loaded until then

    @override
    def _require_room(self) -> None:
        if self._waiting is not None or self.syncs:
            raise second_model()

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self.syncs:
            raise ValueError(
                "One optimizer can take local steps of a sharded model, got a second one; give all "
                "parameters to one, in groups, or use lightning_dist.local_updates"
            )
        if self._waiting is None:
            raise ValueError(
                "Local updates need the model before its optimizer, got an optimizer; call "
                "fabric.setup_module(model) first"
            )
        environment = self._environment()
        case = Case(self._settings, self._waiting, [optimizer], environment)
        check(case, at="optimizers")
        super()._attach(self._waiting, environment)
        self._waiting = None
        return super().setup_optimizer(optimizer)
