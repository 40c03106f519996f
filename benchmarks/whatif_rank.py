"""One rank of `benchmarks/whatif.py`: trains under CommProfiler, one setting after the other.

Reads its settings from the command line as JSON; the profile of every setting goes to a folder of
its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.allreduce_rows import Row
from benchmarks.allreduce_settings import WIDTH
from lightning_dist import CommProfiler

_TIMEOUT = timedelta(seconds=300)  # long enough for the other ranks to compile their kernels


@dataclass(kw_only=True)
class Settings:
    """What the launcher tells every rank."""

    rows: list[str]
    folders: list[str]  # one for every row
    steps: int
    batch: int
    seed: int


def train(row: Row, folder: Path, *, steps: int, batch: int) -> None:
    """Some steps, of which the profile is in `folder`/run-0."""
    inputs, targets = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
    with CommProfiler(row.ddp, dirpath=folder, budget=1.0, html=False, trace=False, show=False):
        for _ in range(steps):
            row.step(inputs, targets)
            row.forget()


def run(settings: Settings) -> None:
    """All of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    torch.manual_seed(settings.seed + 1 + dist.get_rank())
    for name, folder in zip(settings.rows, settings.folders, strict=True):
        row = Row(name, seed=settings.seed)
        dist.barrier()
        train(row, Path(folder), steps=settings.steps, batch=settings.batch)
        if row.handle is not None:
            row.handle.close()
        if dist.get_rank() == 0:
            print(f"  {name}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[1])))
