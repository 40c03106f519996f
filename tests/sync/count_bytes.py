"""One rank: train a few steps per row; print what was counted and what the interfaces sent.

A row is ``FORM/CODEC``; the form is one of `FORMS`, or ``fsdp`` on nodes of two ranks.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import compress_ddp, compress_fsdp

STEPS = 2
FORMS: dict[str, Any] = {"flat": False, "hierarchical": True, "leader": "leader"}


HEADER = 66
"""Bytes of a packet that are not of TCP's payload."""


def sent_by(interface: str, what: str = "bytes") -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_{what}").read_text())


def payload_of(interface: str) -> int:
    return sent_by(interface) - HEADER * sent_by(interface, "packets")


def compressed(form: str, codec: str) -> tuple[nn.Module, Any]:
    model = nn.Sequential(*(nn.Linear(768, 768) for _ in range(3)))
    if form == "fsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        return model, compress_fsdp(model, codec, mesh=mesh, compile_kernels=False)
    ddp = DistributedDataParallel(model)
    return ddp, compress_ddp(ddp, codec, hierarchical=FORMS[form], compile_kernels=False)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    link = os.environ["GLOO_SOCKET_IFNAME"]
    found = {}
    for row in sys.argv[1:]:
        torch.manual_seed(0)
        model, handle = compressed(*row.split("/"))
        inputs = torch.randn(4, 768, generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.barrier()
        before = sent_by(link), sent_by("lo"), payload_of(link)
        for _ in range(STEPS):
            model(inputs).square().mean().backward()
        dist.barrier()  # all that was sent to this rank has arrived
        stats = handle.comm_stats()
        found[row] = {
            "link": sent_by(link) - before[0],
            "lo": sent_by("lo") - before[1],
            "payload": payload_of(link) - before[2],
            "elements": STEPS * sum(parameter.numel() for parameter in model.parameters()),
            **{key: stats[key] for key in ("inter_bytes", "intra_bytes")},
        }
        handle.close()
        dist.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
