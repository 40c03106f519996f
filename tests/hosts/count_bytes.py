"""One rank: train a few steps per row; print what was counted and what the interfaces sent.

A row is ``FORM/CODEC``; the form is one of `FORMS`.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import compress_ddp

STEPS = 2
FORMS: dict[str, Any] = {"flat": False, "hierarchical": True, "leader": "leader"}


def sent_by(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    link = os.environ["GLOO_SOCKET_IFNAME"]
    found = {}
    for row in sys.argv[1:]:
        form, codec = row.split("/")
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(768, 768) for _ in range(3))))
        handle = compress_ddp(model, codec, hierarchical=FORMS[form], compile_kernels=False)
        inputs = torch.randn(4, 768, generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.barrier()
        before = sent_by(link), sent_by("lo")
        for _ in range(STEPS):
            model(inputs).square().mean().backward()
        dist.barrier()  # all that was sent to this rank has arrived
        stats = handle.comm_stats()
        found[row] = {
            "link": sent_by(link) - before[0],
            "lo": sent_by("lo") - before[1],
            **{key: stats[key] for key in ("inter_bytes", "intra_bytes")},
        }
        handle.close()
        dist.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
