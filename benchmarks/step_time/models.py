"""Models that the step-time benchmark trains, with made-up data of their shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.byte_gpt.model import BYTES, ByteGPT

WIDTH, LAYERS, CONTEXT = 1024, 10, 64

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Args:
        blocks: that are sharded by themselves.
        batch: inputs and targets of so many samples, from torch's global generator.
        loss: of the outputs and the targets.
    """

    make: Callable[[], nn.Module]
    blocks: Callable[[Any], Iterable[nn.Module]]
    batch: Callable[[int], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]

    @property
    def gradient_bytes(self) -> int:
        """In fp32."""
        return sum(4 * parameter.numel() for parameter in self.make().parameters())


def _windows(samples: int) -> Batch:
    inputs, targets = (torch.randint(BYTES, (samples, CONTEXT)) for _ in range(2))
    return inputs, targets


MODELS: Mapping[str, Workload] = {
    "linear": Workload(
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
        lambda model: model,
        lambda samples: (torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)),
        lambda outputs, targets: (outputs - targets).square().sum(dim=1).mean(),
    ),
    "gpt": Workload(
        lambda: ByteGPT(CONTEXT),
        lambda model: model.blocks,
        _windows,
        lambda outputs, targets: F.cross_entropy(outputs.flatten(0, 1), targets.flatten()),
    ),
}
