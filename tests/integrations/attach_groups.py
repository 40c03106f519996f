"""Run by torchrun: reducers one after the other, on groups that ``torch.distributed`` makes.

``attach_groups.py FOLDER``: every rank writes ``[case, largest error]`` lines to FOLDER/RANK.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import compress_ddp

ORDERS = [[[0, 1], [2, 3]], [[1, 0], [3, 2]], [[2, 3], [0, 1]], [[1, 0], [2, 3]], [[3, 0], [1, 2]]]
UNEVEN = [[0, 1, 2], [3]]
CASES = [
    *((f"order {tree}", {"rank_groups": tree, "hierarchical": True}) for tree in ORDERS),
    *((f"leader {turn}", {"ranks_per_host": 2, "hierarchical": "leader"}) for turn in (1, 2)),
    *((f"uneven {turn}", {"rank_groups": UNEVEN}) for turn in (1, 2)),
    ("flat", {"hierarchical": False}),
]
"""Reducers are not taken over, so each one has groups of its own."""


def error_of(**settings: Any) -> float:
    """Of one step's gradients, which are the rank everywhere: their mean is 1.5."""
    module = nn.Linear(30, 50)
    model = DistributedDataParallel(module)
    reducer = compress_ddp(model, "none", **settings)
    rank = float(dist.get_rank())
    model(torch.full((1, 30), rank)).sum().backward()
    reducer.close()
    assert module.weight.grad is not None
    return float((module.weight.grad - 1.5).abs().max())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.new_group([0, 1])  # ranks 2 and 3 have fewer groups than the others from here on
    with (folder / str(dist.get_rank())).open("w") as file:
        for case, settings in CASES:
            try:
                found: object = error_of(**settings)
            except RuntimeError as error:
                found = str(error)
            print(json.dumps([case, found]), file=file, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
