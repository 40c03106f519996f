"""A model sharded by FSDP2 inside each node, and local steps between the nodes.

    torchrun --nproc-per-node 4 examples/fsdp2_local_steps.py

Two ranks stand for a node here. Run it again and it goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import wandb
from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import lightning_dist


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--method", default="local_sgd")
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="steps of this start")
    parser.add_argument("--folder", type=Path, default=Path("fsdp2_local_out"))
    arguments = parser.parse_args()

    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    dist.init_process_group("gloo")  # "nccl" on GPUs, and "cuda" for the mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(7)
    data = StdlibBytes()
    data.setup("fit")
    sampler = DistributedSampler(data.train_set, drop_last=True)
    loader = DataLoader(data.train_set, batch_size=data.batch_size, sampler=sampler)
    model = ByteGPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])  # the ranks of a node
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates = lightning_dist.local_updates(
        model, optimizer, method=arguments.method, sync_every=arguments.sync_every
    )

    shared, own = arguments.folder / "shared.pt", arguments.folder / f"rank{dist.get_rank()}.pt"
    if own.exists():
        saved: dict[str, Any] = torch.load(own)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        updates.load_state_dict(torch.load(shared))  # the same on every rank, after its own

    arguments.folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project="lightning_dist",
        dir=arguments.folder,
        mode="disabled" if dist.get_rank() else None,
    )
    first, loss = updates.attempted, torch.nan
    sampler.set_epoch(first)
    for window in loader:
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()  # FSDP reduces gradients inside the node
        optimizer.step()
        optimizer.zero_grad()
        updates.step()  # every fourth one exchanges shards between nodes
        run.log({"loss": loss.item(), **updates.metrics()}, step=updates.attempted)
        if updates.attempted == first + arguments.steps:
            break

    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, own)
    state = updates.state_dict()  # collective: every rank calls it, rank 0 gets it
    if state is not None:
        torch.save(state, shared)
    updates.finish()  # every node has the mean of all
    stats = updates.comm_stats()
    run.log({"comm/total_wire_bytes": stats["wire_bytes"]}, step=updates.attempted)
    run.finish()
    if dist.get_rank() == 0:
        print(
            f"steps {first} to {updates.attempted}, loss {loss:.3f}, "
            f"{stats['wire_bytes'] / 1e6:.2f} MB sent by a rank in {stats['steps']} exchanges"
        )
    updates.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
