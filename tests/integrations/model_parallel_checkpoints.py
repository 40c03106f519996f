"""What tests of checkpoints of sharded models watch and plant."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dist.checkpoint.snapshot.shards import LazyState


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.detach().full_tensor().clone()
    return found


def watch_reads(patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each part of a tensor that is read by itself."""
    read: list[int] = []
    usual = LazyState.run

    def run(self: LazyState, value: Tensor, start: int, numel: int) -> Tensor:
        read.append(numel * value.element_size())
        return usual(self, value, start, numel)

    patch.setattr(LazyState, "run", run)
    return read


class Reshaped(torch.optim.SGD):
    """Keeps something of another shape than its parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["column"] = parameter.detach().unsqueeze(-1)
        return loss
