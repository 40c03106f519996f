"""``SyncStrategy``: base of Fabric's strategies, with a Sync for each model that is set up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary, ref

from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.base.features import FABRIC
from lightning_dist.frameworks.lightning.launcher import follow, sampler_arguments
from lightning_dist.frameworks.registration import described
from lightning_dist.ranks import Topology
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.local_updates import Replicas
from lightning_dist.sync.base import Environment, Sync
from lightning_dist.sync.rules import Case, check

FABRIC.require()


class SyncStrategy(ParallelStrategy):
    """Mixin before a strategy of Fabric: a :class:`.Sync` keeps replicas of each model equal.

    What is sent, and what of it a checkpoint needs, is the Sync's; see :meth:`kind_of_sync`.
    """

    _replicas: Replicas = "rank"

    def __init__(self, settings: ExchangeSettings, **kwargs: Any) -> None:
        self._settings = settings
        self.syncs: list[Sync] = []
        """What keeps replicas of the models equal, in the order of ``fabric.setup``."""
        self._stepping: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()  # in their order
        self._first: dict[int, ref[Optimizer]] = {}  # which counts steps, by place of its sync
        super().__init__(**kwargs)

    def __repr__(self) -> str:
        return described(self, user="Fabric")

    def kind_of_sync(self) -> type[Sync]:
        """Class of the Sync that models get."""
        raise NotImplementedError

    def _environment(self, **facts: Any) -> Environment:
        return Environment(
            grad_scaler=getattr(self.precision, "scaler", None),
            wraps=True,
            several_models=not self.kind_of_sync().of_one_model,
            replicas=self._replicas,
            **facts,
        )

    @property
    def reducers(self) -> list[Reducer]:
        """Reducers of the models, in their order."""
        return [sync.reducer for sync in self.syncs if sync.reducer is not None]

    @property
    def topology(self) -> Topology | None:
        """Nodes and groups of the ranks; None before the first model."""
        return self.syncs[0].topology if self.syncs else None

    def comm_stats(self) -> list[Mapping[str, Any]]:
        """Bytes this rank sent, for each model in the order in which they were given."""
        return [sync.comm_stats() for sync in self.syncs]

    def comm_config(self) -> dict[str, Any]:
        """Codec, exchange, nodes and versions; empty before the first model."""
        return self.syncs[0].comm_config() if self.syncs else {}

    # Set-up.

    @override
    def _configure_launcher(self) -> None:
        follow(self)
        super()._configure_launcher()

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        usual: Any = super().distributed_sampler_kwargs
        return sampler_arguments(self.cluster_environment) or usual

    def _require_room(self) -> None:
        """Raise ValueError if no further model can be set up."""
        if self.syncs and self.kind_of_sync().of_one_model:
            raise second_model()

    def _attach(self, model: Module, environment: Environment) -> None:
        self.syncs.append(self.kind_of_sync().attach(model, self._settings, environment))

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._stepping[optimizer] = None
        for place, sync in enumerate(self.syncs):
            if sync.trains(optimizer):
                own = [stepped for stepped in self._stepping if sync.trains(stepped)]
                sync.connect(own, self._environment())
                self._first.setdefault(place, ref(optimizer))
        return super().setup_optimizer(optimizer)

    # Training.

    def count_samples(self, samples: float) -> None:
        """Count samples, or tokens, of a batch of the step to come, where ``weigh_by="samples"``.

        Call it once for every batch.
        """
        for sync in self.syncs:
            sync.count_samples(samples)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, **kwargs)
        for place, first in self._first.items():
            if first() is optimizer:
                self.syncs[place].step_done()
        return output

    @override
    def clip_gradients_norm(
        self, module: Module, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Tensor:
        self._require_clippable(optimizer)
        return super().clip_gradients_norm(module, optimizer, *args, **kwargs)

    @override
    def clip_gradients_value(
        self, module: Module, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        self._require_clippable(optimizer)
        super().clip_gradients_value(module, optimizer, *args, **kwargs)

    def _require_clippable(self, optimizer: Optimizer) -> None:
        check(Case(self._settings, optimizers=[optimizer]), at="clipping")

    # Checkpoints.

    def _saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` with that of the models' syncs. Collective."""
        kind, states = self.kind_of_sync(), [sync.state_dict() for sync in self.syncs]
        if not kind.of_one_model:
            return {**state, kind.key: states}
        return {**state, kind.key: states[0] if states else None}

    def _saving(self) -> AbstractContextManager[None]:
        """Context in which the models have the weights to save."""
        return nullcontext()

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        saved = self._saved(state)
        with self._saving():
            super().save_checkpoint(path, saved, *args, **kwargs)

    @override
    def load_checkpoint(
        self, path: Any, state: Any | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, dict):  # otherwise somebody looks into a file, or loads one module
            found = rest.pop(self.kind_of_sync().key, None)
            states: Sequence[Any] = found if isinstance(found, list) else [found]
            for sync, own in zip_longest(self.syncs, states[: len(self.syncs)]):
                sync.load_state_dict(own)  # None from a plain one
        return rest


def second_model() -> ValueError:
    """The error for a second model where a training has one."""
    return ValueError(
        "One model can be trained in local steps, got a second one; make another Fabric for it, "
        "or use lightning_dist.local_updates"
    )
