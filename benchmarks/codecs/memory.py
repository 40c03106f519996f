"""Memory of the reducer on real processes; `benchmarks/codecs` prints it."""

from __future__ import annotations

import json
import os
import resource
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import compress_ddp

_TIMEOUT = timedelta(seconds=120)
_WARM = 300  # steps until the C library's allocator has settled; plain DDP moves until then too


def measure_memory(folder: Path, *, steps: int) -> list[dict[str, Any]]:
    """One row per world size: bytes per compressed element, and how the resident set moves."""
    rows = []
    for world_size in (2, 4):
        target = folder / f"memory{world_size}.json"
        arguments = (world_size, steps, str(folder / f"store{world_size}"), str(target))
        mp.spawn(_rank, args=arguments, nprocs=world_size, join=True)
        rows.append(json.loads(target.read_text()))
    return rows


def _rank(rank: int, world_size: int, steps: int, store: str, target: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=_TIMEOUT
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))))
    handle = compress_ddp(model, "int8", compile_kernels=False)
    inputs = torch.randn(4, 512, generator=torch.Generator().manual_seed(rank))
    resident = {}
    for step in range(steps):
        model.zero_grad()
        model(inputs).square().mean().backward()
        if step + 1 in (_WARM, steps):
            resident[step + 1] = _resident_kb()
    if rank == 0:
        compressed = 4 * 512 * 512
        held, stats = handle.memory(), handle.comm_stats()
        wire = stats["per_codec"]["int8"]["wire_bytes"] / stats["steps"]
        row = {
            "world_size": world_size,
            "steps": steps,
            "residual_bytes_per_element": held["residual_bytes"] / compressed,
            "buffer_bytes_per_element": held["buffer_bytes"] / compressed,
            "buffer_over_wire_bytes": held["buffer_bytes"] / wire,
            "resident_mb_warm": resident[_WARM] / 1024,
            "resident_mb_end": resident[steps] / 1024,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        Path(target).write_text(json.dumps(row))
    handle.close()
    dist.destroy_process_group()


def _resident_kb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024
