"""``Fabric(strategy=CompressedModelParallelStrategy(parallelize_fn))``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.frameworks.fabric.residuals import SavesResiduals
from lightning_dist.frameworks.lightning.launcher import FollowsLauncher
from lightning_dist.frameworks.strategies.model_parallel import ModelParallelArguments
from lightning_dist.frameworks.strategies.other_package import OfOneFramework
from lightning_dist.settings.sharded import ShardedSettings
from lightning_dist.settings.signatures import takes
from lightning_dist.sync.mesh import ReplicatedMesh


class ReplicatedModelParallel(
    OfOneFramework, ReplicatedMesh, FollowsLauncher, ModelParallelStrategy
):
    """Fabric's ``ModelParallelStrategy`` with a mesh of several nodes."""

    @override
    def setup_environment(self) -> None:
        # Not that of ModelParallelStrategy, whose mesh has no replicas.
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._device_mesh = self._replicated_mesh()


class CompressedModelParallelStrategy(
    ModelParallelArguments, SavesResiduals, ReplicatedModelParallel
):
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
        super().__init__(settings, parallelize_fn=parallelize_fn, **kwargs)
        self._backward_sync_control: Any = self

    @override
    def setup_module(self, module: Module) -> Module:
        model = super().setup_module(module)
        self._compress(model, precision=self.precision)
        return model

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._require_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Context of ``fabric.no_backward_sync``."""
        found = (each for each in self._exchanges if each.model is module and enabled)
        return next((each.no_sync() for each in found), nullcontext())
