"""Strategies of the Trainer whose modules are whole on each rank, in DDP or without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_dist.elastic.recovery.regroup import refuse_recovery
from lightning_dist.frameworks.lightning.base import SyncStrategy
from lightning_dist.frameworks.lightning.checkpoint.session_io import add_state
from lightning_dist.frameworks.lightning.launcher import ResultsLauncher, init_process_group
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.local_updates import LocalUpdateSettings, Replicas
from lightning_dist.settings.run import RecoverySettings
from lightning_dist.settings.signatures import takes
from lightning_dist.sync.arguments import require_ddp_arguments
from lightning_dist.sync.base import Environment, Sync
from lightning_dist.sync.local.anchor import evaluates_anchor, require_replicas
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.updates import LocalSync
from lightning_dist.sync.rules import Case, check


class SyncDDPStrategy(SyncStrategy, DDPStrategy):
    """``DDPStrategy`` with a :class:`.Sync` in the place of DDP's own exchange."""

    _groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    _leader = 0  # the rank that writes

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
        super().__init__(self._recoverable(settings, recovering), **kwargs)

    def _recoverable(
        self, settings: ExchangeSettings, recovering: RecoverySettings
    ) -> ExchangeSettings:
        """The settings, with what recovery changes in them."""
        refuse_recovery(type(self), recovering)
        return settings

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = ResultsLauncher(self, start_method=self._start_method)

    @override
    def setup_distributed(self) -> None:
        init_process_group(self)
        super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._before_setup()

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        kind, environment = self.kind_of_sync(), self._environment()
        check(Case(self._settings, self.model, environment=environment), at="module")
        wrapper = kind.ddp_arguments(self._settings, environment, self.root_device)
        if wrapper is not None:
            self._ddp_kwargs.update(wrapper)
            super().configure_ddp()
        self._attach(self.model, environment)

    @override
    def _environment(self, **facts: Any) -> Environment:
        return super()._environment(groups=self._groups, saves_shards=False, **facts)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        stock = super().lightning_module_state_dict
        return stock() if self.sync is None else self.sync.weights_to_save(stock)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        # Called on all ranks. Weights-only checkpoints have no optimizer states.
        sync = self.sync
        if sync is not None and "optimizer_states" in checkpoint:
            add_state(checkpoint, sync, self.checkpoint_io, to=self._leader)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # The first moment of a restore at which the sync is there.
        super().load_optimizer_state_dict(checkpoint)
        if self._active is not None:
            self._active.load_state_dict(checkpoint.get(self._active.key))

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if exception.args and isinstance(exception.args[0], str):
            ours = exception.args[0].replace("'ddp_find_unused", "'compressed_ddp_find_unused")
            ours = ours.replace("=DDPStrategy(", f"={type(self).__name__}(")
            exception.args = (ours, *exception.args[1:])


class LocalUpdateStrategy(SyncDDPStrategy):
    """Optimizer steps of every rank alone, and outer steps on the compressed mean of what changed.

    A checkpoint holds the anchor as the model's weights, so that it loads anywhere, and under
    ``"lightning_dist_local_updates"`` what every worker has of its own: weights inside a window and
    optimizer states, collected by rank 0, or written by each rank with
    ``AsyncCheckpoint(format="sharded")``. With another number of workers those who join take the
    anchor, and those who leave take with them what they have not sent.
    """

    sync: LocalSync | None = None

    @takes(LocalUpdateSettings)
    def __init__(
        self,
        settings: LocalUpdateSettings,
        *,
        replicas: Replicas = "rank",
        evaluate: Literal["anchor", "worker"] = "anchor",
        **kwargs: Any,
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            settings: each an argument of the strategy.
            replicas: a worker is a rank, or all ranks of a node with DDP between them; nodes have
                equal weight, whatever their number of ranks.
            evaluate: validation during the fit uses the anchor, equal on all ranks, or each
                worker's own weights.
            **kwargs: see :class:`~lightning_dist.CompressedDDPStrategy`.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        require_replicas(replicas, settings)
        self._replicas: Replicas = replicas
        self._evaluates_shared_weights = evaluates_anchor(evaluate)
        super().__init__(settings, **kwargs)

    @override
    def kind_of_sync(self) -> type[Sync]:
        return LocalSync

    @property
    def updates(self) -> LocalUpdates | None:
        """The outer steps; None before the model is set up."""
        return None if self.sync is None else self.sync.updates
