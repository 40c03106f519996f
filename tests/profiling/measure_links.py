"""One rank: print what the links between hosts were measured to carry, in Mbit/s."""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_dist.profiling.links import OPS, measure, pairs

SENT = 4_000_000  # many times what a shaped link saves up for a burst


def nbytes(op: str) -> int:
    """Of which each of two ranks sends ``SENT``."""
    return SENT if op in ("all_reduce", "broadcast") else 2 * SENT


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    world = dist.group.WORLD
    assert world is not None
    fast = dist.new_group([0, 1])
    found = {}
    if dist.get_rank() < 2:
        found = {op: measure(fast, op, nbytes(op), 5).busbw_gbps * 1000 for op in OPS}
    matrix = pairs(world, SENT // 2)
    rows = [[None if each is None else each * 1000 for each in row] for row in matrix]
    print(json.dumps({"found": found, "pairs": rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
