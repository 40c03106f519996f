"""What a collective costs that carries next to nothing: many small ones are slow on any link."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from lightning_dist.profiling.capture.events import BurstRecord
from lightning_dist.profiling.peer import finish, meet

_BYTES = 4096
_WARMUP = 2
_USES = 5


def measure_burst(
    group: dist.ProcessGroup, *, name: str, count: int, device: torch.device | str = "cpu"
) -> BurstRecord:
    """Gather a few bytes of every rank ``count`` times at once. Collective.

    Medians; the time is equal on all ranks.

    Args:
        group: of two ranks or more.
        name: of the group in the record.
    """
    own = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    outputs = [own.new_zeros(group.size() * _BYTES) for _ in range(count)]
    seconds, cpus = [], []
    for _ in range(_WARMUP + _USES):
        meet(group, device)
        begin, cpu = time.perf_counter(), time.process_time()
        works = [
            dist.all_gather_single(output, own, group=group, async_op=True) for output in outputs
        ]
        for work in works:
            work.wait()
        finish(device)
        seconds.append(time.perf_counter() - begin)
        cpus.append(time.process_time() - cpu)
    slowest = torch.tensor(seconds[_WARMUP:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    sent = (group.size() - 1) * _BYTES
    return BurstRecord(
        name, "all_gather", sent, count, median(slowest.tolist()), median(cpus[_WARMUP:])
    )
