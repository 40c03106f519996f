"""The arguments that all strategies of local updates take, Lightning's and Fabric's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_dist.codecs import Codec
from lightning_dist.settings.exchange import Settings
from lightning_dist.sync.local.anchor import OuterOptimizer, OuterSchedule
from lightning_dist.sync.local.checks import require_replicas
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.settings import (
    LocalUpdateSettings,
    Method,
    Weight,
    default_codec,
)
from lightning_dist.sync.local.state import WorkerStates
from lightning_dist.sync.local.updates import attach
from lightning_dist.sync.networks import node_group

LOCAL_KEY = "lightning_dist_local_updates"
"""Of the state of all workers in a checkpoint."""


_OF_GRADIENTS = {
    "start_step": "ddp_steps are steps of plain DDP before the first local one",
    "delay": "overlap_steps are the steps that an exchange may take",
    "compile_kernels": "they exchange seldom and compile nothing, so leave it out",
}
"""Arguments of ``compressed_ddp`` alone, and what to do instead."""


class LocalUpdateArguments:
    """Mixin before what takes the codec; typed, so that LightningCLI reads them from YAML."""

    _updates: LocalUpdates | None = None
    _states: WorkerStates | None = None
    _kind_of_states = WorkerStates

    if TYPE_CHECKING:
        _settings: Settings

    def __init__(
        self,
        method: Method = "diloco",
        sync_every: int | None = None,
        fragments: int | None = None,
        overlap_steps: int | None = None,
        mixing: float | None = None,
        ddp_steps: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        outer_optimizer: OuterOptimizer | None = None,
        outer_schedule: OuterSchedule | None = None,
        replicas: Literal["rank", "node"] = "rank",
        offload: bool = False,
        weigh_by: Weight = "workers",
        codec: str | Codec | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            method: this and the next nine as for :func:`~lightning_dist.local_updates`.
            sync_every: attempted optimizer steps between two outer steps of a parameter.
            fragments: parts of the model that are exchanged in turn.
            overlap_steps: attempted steps that an exchange has before its mean is used.
            mixing: weight of a worker's own parameters when the anchor has moved.
            ddp_steps: steps of plain DDP before the first local one.
            outer_lr: of the outer SGD.
            outer_momentum: of the outer SGD, Nesterov.
            outer_optimizer: another one, made from the anchor's tensors.
            outer_schedule: learning rate scheduler, made from the outer optimizer.
            replicas: a worker is a rank, or all ranks of a node with DDP between them; nodes have
                equal weight, whatever their number of ranks.
            offload: keep the anchor and the outer optimizer's state in the host's memory.
            weigh_by: a worker counts as one of the ``"workers"``, or by the ``"samples"`` of its
                batches; under Fabric :meth:`count_samples` says how many.
            codec: of what is exchanged between workers: by default int8, of sparseloco its own.
            **kwargs: see :class:`~lightning_dist.CompressedDDPStrategy`; of a sharded model
                :class:`.ShardedLocalArguments`.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        self._schedule = LocalUpdateSettings.check(
            method,
            sync_every=sync_every,
            fragments=fragments,
            overlap_steps=overlap_steps,
            mixing=mixing,
            ddp_steps=ddp_steps,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer_optimizer=outer_optimizer,
            offload=offload,
            weigh_by=weigh_by,
        )
        self._samples: float | None = None
        require_replicas(replicas, self._schedule)
        for name, remedy in _OF_GRADIENTS.items():
            if kwargs.get(name, "auto") not in (0, "auto"):
                raise ValueError(
                    f"{name}={kwargs[name]!r} has no effect on local updates; {remedy}"
                )
        self._outer_optimizer, self._outer_schedule = outer_optimizer, outer_schedule
        self._replicas = replicas
        chosen = default_codec(method) if codec is None else codec
        super().__init__(chosen, **kwargs)  # type: ignore[call-arg]

    def _attach(self, model: nn.Module, optimizers: Sequence[Optimizer], precision: object) -> None:
        self._updates = attach(
            model,
            optimizers,
            self._schedule,
            self._settings,
            outer_optimizer=self._outer_optimizer,
            outer_schedule=self._outer_schedule,
        )
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
        if samples is None and self._schedule.weigh_by == "samples":
            raise ValueError(
                "weigh_by='samples' needs the number of samples; call "
                "strategy.count_samples(len(batch)) before the optimizer's step"
            )
        self._updates.step(samples)

    def _wraps(self, ddp_kwargs: dict[str, Any], device: torch.device) -> bool:
        """Whether the model is in DDP, which gets ``ddp_kwargs``: in nodes, or at first."""
        if self._replicas == "node":
            assert dist.group.WORLD is not None
            group = node_group(dist.group.WORLD, self._settings, device=device)
            ddp_kwargs["process_group"] = group
        return self._replicas == "node" or self._schedule.ddp_steps > 0
