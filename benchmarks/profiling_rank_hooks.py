"""The same step with DDP's own allreduce and with hooks in its place, block by block."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.profiling_rank_cost import Training, batch_of
from lightning_dist.profiling.capture.ddp_hook import WatchedAllReduce, watch_allreduce
from lightning_dist.profiling.capture.recorder import Recorder

_LEAST_STEPS = 2
_SETTLE = 4
_TWINS = 3
"""Models with the same hook. Where a model lies in memory makes a difference of its own."""


def hooks(
    folder: Path,
    *,
    buckets: int,
    layers: int,
    width: int,
    step_ms: float,
    rounds: int,
    block_s: float,
) -> dict[str, Any]:
    """Wall and CPU milliseconds of a step, a pair for every block, by the hook."""
    trainings = {
        name: [Training("ddp", buckets=buckets, layers=layers, width=width) for _ in range(_TWINS)]
        for name in KINDS
    }
    for name, twins in trainings.items():
        for twin in twins:
            KINDS[name](twin.model)
    for twin in (each for twins in trainings.values() for each in twins):
        twin.block(_SETTLE, batch=1)  # before a step is timed: DDP builds its buckets anew
    batch, estimate_ms = batch_of(trainings["none"][0], step_ms)
    steps = max(_LEAST_STEPS, round(1000 * block_s / estimate_ms))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    order = random.Random(0)  # equal on all ranks
    for number in range(rounds):
        for name in order.sample([*KINDS], len(KINDS)):
            dist.barrier()
            found[name].append(trainings[name][number % _TWINS].block(steps, batch))
    bucket_mb = 4 * (width + 1) * width * layers / buckets / 1e6
    return {"blocks": found, "batch": batch, "buckets": buckets, "bucket_mb": bucket_mb}


def _of_torch(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, allreduce_hook)


def _ours(model: DistributedDataParallel, *, is_on: bool) -> None:
    recorder = Recorder()
    recorder.is_on = is_on
    group = model.process_group
    assert group is not None
    assert watch_allreduce(model, WatchedAllReduce(recorder, group, crosses=True))
    model.register_forward_pre_hook(lambda *_: recorder.drop())


KINDS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "none": lambda model: None,
    "torch": _of_torch,
    "off": lambda model: _ours(model, is_on=False),
    "on": lambda model: _ours(model, is_on=True),
}
"""What is in the place of DDP's own allreduce: nothing, torch's hook in Python, and ours, with a
recorder that is off and with one that is on."""
