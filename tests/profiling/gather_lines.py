"""One rank of four, each with a folder of its own; rank 2 dies between two calls.

Prints what its gatherer says in the end. The argument is where the folders are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
from forked import TIMEOUT, run_ranks, say

from lightning_dist.profiling.capture.gathering import Gatherer, is_shared

VICTIM = 2
STEPS = 6


def main() -> None:
    rank = dist.get_rank()
    folder = Path(sys.argv[1]) / str(rank)
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    gatherer = Gatherer(folder, group=group, is_shared=is_shared(folder, group))

    for step in range(STEPS):
        if rank == VICTIM and step == STEPS // 2:
            os.kill(os.getpid(), 9)
        gatherer.collect(f"step {step} of rank {rank}\n".encode())
    problems = gatherer.close(TIMEOUT.total_seconds())
    say(rank=rank, problems=problems)
    os._exit(0)  # one is missing: the group cannot be left in order


if __name__ == "__main__":
    run_ranks(main, size=4)
