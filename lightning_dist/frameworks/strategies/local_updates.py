"""The arguments that all strategies of local updates take, Lightning's and Fabric's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_dist.settings.local_updates import LocalUpdateSettings, Replicas
from lightning_dist.settings.signatures import takes
from lightning_dist.sync.local.checks import require_replicas
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.state import WorkerStates
from lightning_dist.sync.local.updates import attach
from lightning_dist.sync.networks import node_group

LOCAL_KEY = "lightning_dist_local_updates"
"""Key of the state of all workers in a checkpoint."""


class LocalUpdateArguments:
    """Mixin before what takes the settings of an exchange."""

    _updates: LocalUpdates | None = None
    _states: WorkerStates | None = None
    _kind_of_states = WorkerStates

    @takes(LocalUpdateSettings)
    def __init__(
        self,
        settings: LocalUpdateSettings,
        *,
        replicas: Replicas = "rank",
        **kwargs: Any,
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            settings: each an argument of the strategy.
            replicas: a worker is a rank, or all ranks of a node with DDP between them; nodes have
                equal weight, whatever their number of ranks.
            **kwargs: see :class:`~lightning_dist.CompressedDDPStrategy`; of a sharded model
                :class:`.ShardedLocalArguments`.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        self._samples: float | None = None
        require_replicas(replicas, settings)
        self._local, self._replicas = settings, replicas
        super().__init__(settings, **kwargs)  # type: ignore[call-arg]

    def _attach(self, model: nn.Module, optimizers: Sequence[Optimizer], precision: object) -> None:
        self._updates = attach(model, optimizers, self._local)
        scaler = getattr(precision, "scaler", None)
        self._states = self._kind_of_states(self._updates, optimizers, scaler=scaler)

    @property
    def updates(self) -> LocalUpdates | None:
        """The outer steps; None before the model is set up."""
        return self._updates

    def count_samples(self, samples: float) -> None:
        """Count samples, or tokens, of a batch of the step to come, where ``weigh_by="samples"``.

        A Trainer does that itself. Under Fabric call it once for every batch.
        """
        self._samples = (self._samples or 0.0) + samples

    def _count_step(self) -> None:
        """The first optimizer has attempted a step; exchange where it is time."""
        assert self._updates is not None
        samples, self._samples = self._samples, None
        if samples is None and self._local.weigh_by == "samples":
            raise ValueError(
                "weigh_by='samples' needs the number of samples; call "
                "strategy.count_samples(len(batch)) before the optimizer's step"
            )
        self._updates.step(samples)

    def _wraps(self, ddp_kwargs: dict[str, Any], device: torch.device) -> bool:
        """True if the model is wrapped in DDP, which gets ``ddp_kwargs``: in nodes, or at first."""
        if self._replicas == "node":
            assert dist.group.WORLD is not None
            group = node_group(dist.group.WORLD, self._local, device=device)
            ddp_kwargs["process_group"] = group
        return self._replicas == "node" or self._local.ddp_steps > 0
