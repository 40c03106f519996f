"""``Fabric(strategy="compressed_diloco")``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.frameworks.lightning.launcher import FollowsLauncher
from lightning_dist.frameworks.strategies.arguments import CompressionArguments
from lightning_dist.frameworks.strategies.local_updates import LOCAL_KEY, LocalUpdateArguments
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.sync.report import CommReport
from lightning_dist.sync.rules import require_compressible


class LocalSteps(CommReport, LocalUpdateArguments):
    """Mixin before a strategy of Fabric: counts its optimizer steps, and loads its workers."""

    _first: Optimizer | None = None

    @property
    def reducers(self) -> list[Reducer]:
        """Of the model; empty before it is set up."""
        return [] if self._updates is None else [self._updates.reducer]

    @staticmethod
    def _second_model() -> ValueError:
        return ValueError(
            "One model can be trained in local steps, got a second one; make another Fabric for "
            "it, or use lightning_dist.local_updates"
        )

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc]
        if self._updates is not None and optimizer is self._first:
            self._count_step()
        return output

    def load_checkpoint(
        self, path: Any, state: Any | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        load = super().load_checkpoint  # type: ignore[misc]
        rest: dict[str, Any] = load(path, state, *args, **kwargs)
        if isinstance(state, dict):  # otherwise somebody looks into a file, or loads one module
            of_all: Mapping[str, Any] | None = rest.pop(LOCAL_KEY, None)
            if self._states is not None and self._updates is not None:
                if of_all is None:  # of another strategy
                    self._updates.anchor_from_weights()
                else:
                    self._states.load_state_dict(of_all)
        return rest


class LocalUpdateStrategy(LocalSteps, CompressionArguments, FollowsLauncher, DDPStrategy):
    """Optimizer steps of every rank alone; arguments as the Lightning strategy of that name.

    One model with its optimizers, in one ``fabric.setup(model, optimizer)``. Every step of the
    first optimizer counts. Call ``strategy.updates.finish()`` after the last one; evaluate ``with
    strategy.updates.anchor_weights():``. With ``weigh_by="samples"`` call
    ``strategy.count_samples(len(batch))`` for every batch.

    ``fabric.save`` stores the anchor as the weights of the model, and the state of all workers
    under ``"lightning_dist_local_updates"``; ``fabric.load`` after ``fabric.setup`` restores both.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self._local.ddp_steps and self._replicas == "rank":
            self._backward_sync_control = _NothingToSync()  # type: ignore[assignment]  # its one method

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
        if self._updates is not None:
            raise self._second_model()
        require_compressible(module)
        model = module
        if self._wraps(self._ddp_kwargs, self.root_device):
            model = super().setup_module(module)
        self._attach(model, optimizers, self.precision)
        self._first = optimizers[0]
        return model, optimizers, *scheduler

    @override
    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        found = super().get_module_state_dict(module)
        if self._updates is None or not self._updates.is_of(module):
            return found
        return self._updates.anchor_state_dict()

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        of_all = None if self._states is None else self._states.state_dict()
        super().save_checkpoint(path, {**state, LOCAL_KEY: of_all}, *args, **kwargs)


class _NothingToSync:
    """Of backward passes that exchange nothing."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()
