"""The default process group of a rank that torchrun may have started before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_dist.elastic.store import attempt_store
from lightning_dist.integrations.lightning.elastic.environment import launch_of
from lightning_dist.integrations.lightning.private import group_timeout, init_process_group_over

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricStrategy
    from lightning.pytorch.strategies import DDPStrategy


def init_process_group(strategy: DDPStrategy | FabricStrategy) -> None:
    """Make the group as ``strategy`` would, over a store of this start's own.

    Nothing happens where torchrun did not start this rank, or where the group is there. Call it
    before the strategy's own set-up, which does nothing once there is a group.

    Raises:
        TimeoutError: ranks did not come within the strategy's ``timeout``.
    """
    launch = launch_of(strategy.cluster_environment)
    if launch is None or dist.is_initialized():
        return
    assert strategy.cluster_environment is not None
    timeout = group_timeout(strategy) or default_pg_timeout
    init_process_group_over(attempt_store(launch, timeout=timeout), strategy)
