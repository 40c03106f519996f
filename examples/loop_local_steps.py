"""A loop of plain PyTorch in local steps: workers exchange what they have changed every few steps.

    torchrun --nproc-per-node 2 examples/loop_local_steps.py

Run it again and it goes on from the checkpoint, of as many workers.
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
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import lightning_dist


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--method", default="local_sgd")
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="steps of this start")
    parser.add_argument("--folder", type=Path, default=Path("loop_local_out"))
    arguments = parser.parse_args()

    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    dist.init_process_group("gloo")  # "nccl" on GPUs, and the model on the local one
    torch.manual_seed(7)
    data = StdlibBytes()
    data.setup("fit")
    sampler = DistributedSampler(data.train_set, drop_last=True)
    loader = DataLoader(data.train_set, batch_size=data.batch_size, sampler=sampler)
    model = ByteGPT()  # not in DistributedDataParallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates = lightning_dist.local_updates(
        model, optimizer, method=arguments.method, sync_every=arguments.sync_every
    )

    shared, own = arguments.folder / "shared.pt", arguments.folder / f"worker{dist.get_rank()}.pt"
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
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        updates.step()  # every fourth one exchanges
        run.log({"loss": loss.item(), **updates.metrics()}, step=updates.attempted)
        if updates.attempted == first + arguments.steps:
            break

    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, own)
    state = updates.state_dict()  # collective: every rank calls it, rank 0 gets it
    if state is not None:
        torch.save(state, shared)
    updates.finish()  # every worker has the mean of all
    stats = updates.comm_stats()
    run.log({"comm/total_wire_bytes": stats["wire_bytes"]}, step=updates.attempted)
    run.finish()
    if dist.get_rank() == 0:
        print(
            f"steps {first} to {updates.attempted}, loss {loss:.3f}, "
            f"{stats['wire_bytes'] / 1e6:.2f} MB sent in {stats['steps']} exchanges"
        )
    updates.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
