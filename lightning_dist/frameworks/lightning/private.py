"""Private and undocumented names of Lightning that its strategies need, verified on import.

Classes of ours override some of them and inherit others, which stand in the tables too.
"""

from __future__ import annotations

from datetime import timedelta
from inspect import signature
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import nn

from lightning_dist.base.features import LIGHTNING

LIGHTNING.require()

# Its public name is an object of a Trainer, which has no argument for another.
MultiProcessingLauncher = _MultiProcessingLauncher


# A strategy makes its group with the default store, which outlives a start.
def init_process_group_over(store: Any, strategy: Any) -> None:
    """Make the default process group as a ``DDPStrategy`` would, over ``store``."""
    device = strategy.root_device
    _init_dist_connection(
        strategy.cluster_environment,
        strategy._get_process_group_backend(),
        store=store,
        timeout=group_timeout(strategy),
        device_id=None if device.type == "cpu" else device,
    )


# A strategy takes it and does not tell it.
def group_timeout(strategy: Any) -> timedelta | None:
    """The timeout of the process groups of a ``DDPStrategy``; None for torch's default."""
    timeout: timedelta | None = strategy._timeout
    return timeout


# `LightningModule.device_mesh` has no setter.
def give_device_mesh(module: pl.LightningModule, mesh: Any) -> None:
    """Let ``module.device_mesh`` be ``mesh``."""
    module._device_mesh = mesh


# It came with Lightning 2.6.
def restricted(weights_only: bool | None) -> dict[str, Any]:
    """The argument ``weights_only`` of functions that load checkpoints, where they have it."""
    has_it = "weights_only" in signature(Strategy.load_checkpoint).parameters
    return {"weights_only": weights_only} if has_it else {}


# Fabric's `module` is the one that the user gave, without DDP.
def without_fabric(model: nn.Module) -> nn.Module:
    """The module that Fabric has wrapped for a user; the model itself if it has not."""
    inner: nn.Module = getattr(model, "_forward_module", model)
    return inner
