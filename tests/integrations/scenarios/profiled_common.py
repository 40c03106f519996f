"""What the runs under CommProfiler share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import CommProfiler

STEPS = 12
LIMIT = timedelta(seconds=60)

quiet_profiler = partial(CommProfiler, print_summary=False, html=False)
"""For a run of which neither the printed summary nor the page is looked at."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def tell(folder: Path, **truth: Any) -> None:
    (folder / f"truth-{dist.get_rank()}.json").write_text(json.dumps(truth))


def busy(seconds: float) -> None:
    """What a slow rank does; planted, and measured by who plants it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def train(
    model: nn.Module,
    *,
    steps: int = STEPS,
    late: Callable[[int], float] = lambda step: 0.0,
    fails_at: int | None = None,
) -> list[int]:
    """When each backward pass began on this rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    begun = []
    for step in range(steps):
        loss = model(torch.randn(8, 256, generator=generator)).square().mean()
        busy(late(step))
        if step == fails_at:
            raise ArithmeticError("the loss is odd")
        begun.append(time.monotonic_ns())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return begun


def digest(model: nn.Module) -> str:
    return repr([p.double().sum().item() for p in model.parameters()])


def ddp(**arguments: Any) -> DistributedDataParallel:
    return DistributedDataParallel(network(), bucket_cap_mb=0.3, **arguments)
