"""``Fabric(strategy="compressed_ddp")``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.base.private import loss_scale_of
from lightning_dist.elastic.recovery.member import RecoveryEnvironment
from lightning_dist.frameworks.fabric.residuals import SavesResiduals
from lightning_dist.frameworks.lightning.launcher import (
    FollowsLauncher,
    MembersEnvironment,
)
from lightning_dist.frameworks.strategies.arguments import CompressionArguments
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.sync.ddp import attach, connect_to_own, refuse_clipping
from lightning_dist.sync.rules import require_compressible


class CompressedDDPStrategy(SavesResiduals, CompressionArguments, FollowsLauncher, DDPStrategy):
    """Fabric's DDP with compressed gradients; arguments as the Lightning strategy of that name.

    Every module given to ``fabric.setup`` gets a reducer of its own. ``fabric.save`` stores their
    residuals under ``"lightning_dist"``; ``fabric.load`` after ``fabric.setup`` restores them.

    After ``lightning_dist.init_process_group(recovery="in_process")`` ranks are those of the
    present generation: see ``ElasticLoop(recovery="in_process")``.
    """

    reducers: list[Reducer]
    """Of the modules, in the order of ``fabric.setup``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reducers = []

    @override
    def _setup_distributed(self) -> None:
        if dist.is_initialized() and RecoveryEnvironment.from_env() is not None:
            self.cluster_environment = MembersEnvironment()
        super()._setup_distributed()

    @override
    def setup_module(self, module: Module) -> DistributedDataParallel:
        require_compressible(module, self._settings)
        model = super().setup_module(module)
        self.reducers.append(
            attach(
                model,
                self._settings,
                grad_scale=loss_scale_of(getattr(self.precision, "scaler", None)),
                one_of_several=True,
            )
        )
        return model

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        connect_to_own(optimizer, self.reducers)
        return super().setup_optimizer(optimizer)

    @override
    def clip_gradients_norm(
        self, module: Module, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Tensor:
        refuse_clipping(optimizer)
        return super().clip_gradients_norm(module, optimizer, *args, **kwargs)

    @override
    def clip_gradients_value(
        self, module: Module, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        refuse_clipping(optimizer)
        super().clip_gradients_value(module, optimizer, *args, **kwargs)

    def _load_state(self, owner: Reducer, state: Any) -> None:
        owner.load_state_dict(state)
