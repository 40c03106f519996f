"""Base of both CompressedModelParallelStrategy: arguments, bytes and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_dist.base.log import get_logger
from lightning_dist.base.private import loss_scale_of
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.sharded import ShardedSettings
from lightning_dist.settings.signatures import refuse_codec_options, takes
from lightning_dist.sync.fsdp.attach import (
    ShardedExchange,
    attach_replicas,
    attach_shards,
)
from lightning_dist.sync.fsdp.replicas import ShardedGradients
from lightning_dist.sync.fsdp.shards import CompressedShards
from lightning_dist.sync.in_force import show
from lightning_dist.sync.mesh import DIMENSIONS, ReplicatedMesh
from lightning_dist.sync.onebit_adam import OneBitAdam
from lightning_dist.sync.report import CommReport, Reports
from lightning_dist.sync.rules import require_one_momentum

log = get_logger(__name__)


class ModelParallelArguments(CommReport, ReplicatedMesh):
    """Mixin before a ``ModelParallelStrategy`` that compresses gradients between replicas."""

    _settings: ShardedSettings

    if TYPE_CHECKING:
        _timeout: timedelta | None

    @takes(ShardedSettings)
    def __init__(self, settings: ShardedSettings, **kwargs: Any) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            settings: each an argument of the strategy.
            **kwargs: see :class:`.ReplicatedMesh`, and everything else that
                ``ModelParallelStrategy`` takes.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        refuse_codec_options(kwargs, settings.codec, of=type(self))
        self._sharded = settings
        self._exchanges: list[ShardedExchange] = []  # of the models, in their order
        super().__init__(settings, **kwargs)

    @property
    def reducers(self) -> list[Reducer]:
        """Reducers of the models, in their order; none with ``parameters=``."""
        return [each.reducer for each in self._exchanges if isinstance(each, ShardedGradients)]

    @property
    def _reports(self) -> Sequence[Reports]:
        return self._exchanges

    @property
    def shards(self) -> CompressedShards | None:
        """The quantised collectives of the model, of the last one; None without ``parameters=``."""
        found = [each for each in self._exchanges if isinstance(each, CompressedShards)]
        return found[-1] if found else None

    def _replicated_mesh(self) -> DeviceMesh:
        mesh = super()._replicated_mesh()
        alone = mesh[DIMENSIONS[0]].size() == 1
        if alone and dist.get_rank() == 0 and self._settings.parameters is None:
            log.warning(
                "One replica: nothing crosses between nodes and nothing is compressed, codec %s "
                "takes effect with two nodes or more, or with replicate_size=",
                self._settings.inter,
            )
        return mesh

    def _require_optimizer(self, optimizer: Optimizer) -> None:
        require_one_momentum(optimizer, self._settings)
        if isinstance(optimizer, OneBitAdam):
            raise ValueError(
                "OneBitAdam exchanges momenta of whole parameters, and here they are sharded; use "
                "torch.optim.AdamW"
            )

    def _compress(
        self, model: nn.Module, *, precision: Any, continue_from: Reducer | None = None
    ) -> ShardedExchange | None:
        """Compress what ``model`` sends; None where nothing is, with one replica. Collective.

        Args:
            precision: the plugin, which may have a GradScaler.
        """
        mesh, grad_scale = self.device_mesh, loss_scale_of(getattr(precision, "scaler", None))
        settings = self._settings
        if settings.parameters is not None:
            own = mesh[DIMENSIONS[1]]
            shards = attach_shards(model, settings, mesh=own, grad_scale=grad_scale)
            self._exchanges.append(shards)
            if dist.get_rank() == 0:
                show(
                    lambda: (
                        f"compressed FSDP2 over {own.size()} ranks: parameters in "
                        f"{settings.policy_of_parameters}, "
                        f"gradients in {settings.policy_of_gradients}"
                    )
                )
            return shards
        if mesh[DIMENSIONS[0]].size() == 1:
            return None
        gradients = attach_replicas(
            model,
            settings,
            mesh=mesh[DIMENSIONS[:2]],
            continue_from=continue_from,
            grad_scale=grad_scale,
        )
        if dist.get_rank() == 0:
            sizes = dict(zip(DIMENSIONS, mesh.shape, strict=True))
            show(lambda: f"compressed FSDP2: codec {settings.inter}, mesh {sizes}")
        self._exchanges.append(gradients)
        return gradients

    def _load_state(self, exchange: ShardedExchange, state: Mapping[str, Any] | None) -> None:
        """Go on from ``exchange.state_dict()``, the same on every rank; None starts afresh."""
        if state is not None and ("steps" in state) != isinstance(exchange, CompressedShards):
            if dist.get_rank() == 0:
                log.warning(
                    "The checkpoint is of a run that was compressed in the other way, between "
                    "replicas or, with parameters=, over all ranks: residuals are dropped"
                )
            state = None
        exchange.load_state_dict(state)
