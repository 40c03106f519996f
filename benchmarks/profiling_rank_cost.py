"""The same step with and without the profiler, block by block in the same processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.profiling_rank_planted import compressed
from lightning_dist.integrations.profile_run import ProfileRun
from lightning_dist.profiling.capture.session import SessionSettings

_WIDTH = 128
_LAYERS = 40
_LEAST_STEPS = 3
_SETTLE = 48
"""Steps in which the profiler finds out how many it may look at. They do not count."""


def cost(
    folder: Path,
    *,
    codec: str,
    buckets: int,
    step_ms: float,
    rounds: int,
    block_s: float,
    budget: float,
) -> dict[str, Any]:
    """Wall and CPU milliseconds of a step, a pair for every block, by whether it was profiled."""
    bare, profiled = (Training(codec, buckets=buckets) for _ in range(2))
    batch, estimate_ms = batch_of(bare, step_ms)
    run = ProfileRun(profiled.model, parent=folder, settings=SessionSettings(budget=budget))
    for training in (bare, profiled):
        training.block(_SETTLE, batch)
    steps = max(_LEAST_STEPS, round(1000 * block_s / estimate_ms))
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for number in range(rounds):
        turn = [("without", bare), ("with", profiled)]
        for name, training in turn if number % 2 else reversed(turn):
            run.exclude_interval()
            dist.barrier()
            found[name].append(training.block(steps, batch))
    run.exclude_interval()
    run.close("finished", together=True)
    return {**found, "batch": batch, "steps": steps, "first": _SETTLE}


class Training:
    """Layers whose gradients are ``buckets`` buckets, as many in each."""

    def __init__(
        self, codec: str, *, buckets: int, layers: int = _LAYERS, width: int = _WIDTH
    ) -> None:
        torch.manual_seed(0)
        self._width = width
        module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        # A bucket is closed by the parameter that reaches the cap: weights do, biases are small.
        cap = (width + 1) * width * 4 / 2**20 * layers / buckets * 0.98
        self.model = compressed(DistributedDataParallel(module, bucket_cap_mb=cap), codec)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def block(self, steps: int, batch: int) -> tuple[float, float]:
        """Wall and CPU milliseconds of a step."""
        inputs = torch.ones(batch, self._width)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.model(inputs).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return 1000 * wall / steps, 1000 * cpu / steps


def batch_of(training: Training, step_ms: float) -> tuple[int, float]:
    """With which a step takes about that long, or the least; and how long. Of rank 0, for all."""
    small, large = 16, 272
    training.block(_LEAST_STEPS, small)
    short, long = (training.block(_LEAST_STEPS, batch)[0] for batch in (small, large))
    of_sample = max(long - short, 1e-3) / (large - small)
    batch = max(1, round(small + (step_ms - short) / of_sample))
    found = torch.tensor([batch, max(step_ms, short)], dtype=torch.float64)
    dist.broadcast(found, src=0)
    return int(found[0]), float(found[1])
