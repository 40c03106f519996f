"""``Fabric(strategy=LocalUpdateModelParallelStrategy(parallelize_fn))``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.frameworks.fabric.local_updates import LocalSteps
from lightning_dist.frameworks.fabric.model_parallel import ReplicatedModelParallel
from lightning_dist.frameworks.strategies.local_model_parallel import ShardedLocalArguments
from lightning_dist.frameworks.strategies.local_updates import LOCAL_KEY


class LocalUpdateModelParallelStrategy(LocalSteps, ShardedLocalArguments, ReplicatedModelParallel):
    """Fabric's model parallelism inside nodes, and outer steps between them.

    ``parallelize_fn(module, device_mesh)`` calls ``fully_shard`` with
    ``device_mesh["data_parallel"]``; the other arguments are as of the Lightning strategy of that
    name. One model and one optimizer, made from the parameters of the sharded model::

        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

    All else is as of Fabric's :class:`~lightning_dist.fabric.LocalUpdateStrategy`.
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Module],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, parallelize_fn=parallelize_fn, **kwargs)
        self._model: Module | None = None

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
    def setup_module(self, module: Module) -> Module:
        if self._model is not None:
            raise self._second_model()
        self._require_workers(self.device_mesh)
        self._model = super().setup_module(module)
        return self._model

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self._model is None:
            raise ValueError(
                "Local updates need the model before its optimizer, got an optimizer; call "
                "fabric.setup_module(model) first"
            )
        if self._updates is not None:
            raise ValueError(
                "One optimizer can take local steps of a sharded model, got a second one; give all "
                "parameters to one, in groups, or use lightning_dist.local_updates"
            )
        self._attach(self._model, [optimizer], self.precision)
        self._first = optimizer
        return super().setup_optimizer(optimizer)

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._states is None or self._updates is None:
            super().save_checkpoint(path, state, *args, **kwargs)
            return
        of_all = self._states.state_dict()
        if self._save_distributed_checkpoint and not self._states.is_of_first:
            # Not a mixture of the workers' optimizers.
            state = {k: each for k, each in state.items() if not isinstance(each, Optimizer)}
        with self._updates.anchor_weights():
            super().save_checkpoint(path, {**state, LOCAL_KEY: of_all}, *args, **kwargs)
