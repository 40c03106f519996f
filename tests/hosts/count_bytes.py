"""One rank: train a few steps per codec; print what was counted and what the interface sent."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import compress_ddp

STEPS = 4


def interface_bytes() -> int:
    name = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {}
    for codec in sys.argv[1:]:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(768, 768) for _ in range(3))))
        handle = compress_ddp(model, codec, compile_kernels=False)
        inputs = torch.randn(4, 768, generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.barrier()
        before = interface_bytes()
        for _ in range(STEPS):
            model(inputs).square().mean().backward()
        dist.barrier()  # all that was sent to this rank has arrived
        sent = interface_bytes() - before
        stats = handle.comm_stats()
        found[codec] = {"interface": sent, **{k: stats[k] for k in ("inter_bytes", "intra_bytes")}}
        handle.close()
        dist.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
