"""The process groups and the place that a reducer works with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_dist.topology import Topology


@dataclass(frozen=True)
class Network:
    """The groups and places that a reducer works with."""

    data: dist.ProcessGroup  # payloads; used by nobody else
    control: dist.ProcessGroup  # a few flags a step, which must not queue behind payloads
    topology: Topology
    device: torch.device

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def rank(self) -> int:
        return self.topology.rank
