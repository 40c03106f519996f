"""Models in local updates for the profiler, which knows DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from lightning_dist.integrations.torch.local.outer_steps import LocalUpdates
from lightning_dist.profiling.capture.steps import StepTimer


class LocalModel:
    """Has of a DistributedDataParallel what the profiler asks for."""

    bucket_bytes_cap = None
    is_multi_device_module = False

    def __init__(self, updates: LocalUpdates) -> None:
        self.updates, self.module = updates, updates.module
        self.device = updates.reducer.network.device
        self.process_group = dist.group.WORLD

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the module."""
        return self.module.parameters()

    def why_not_in_detail(self) -> str:
        """Reason why exchanges cannot be timed; empty if they can."""
        schedule = self.updates.schedule
        if schedule.overlap_steps:
            return f"with overlap_steps={schedule.overlap_steps} an exchange is of many steps"
        if schedule.ddp_steps:
            return "exchanges of the first ddp_steps are those of DDP"
        if self.device.type != "cpu":
            return "exchanges of local updates are timed on CPUs only"
        return ""


class LocalWatching:
    """Tells a timer of attempted steps: each ends with ``updates.step()``, waiting included.

    Passes are not seen: a Trainer may call methods of its module, and not the module.
    """

    def __init__(self, model: LocalModel, timer: StepTimer) -> None:
        self._after, self._timer = model.updates.after_step, timer
        self._after.append(self._stepped)

    def stop(self) -> None:
        """Tell nothing more."""
        self._after.remove(self._stepped)

    def _stepped(self) -> None:
        self._timer.backward_ended(synchronised=True)
        self._timer.stepped()
        self._timer.end()
