"""A loop of plain PyTorch: one line compresses the gradients of a DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/ddp_train.py

Run it again and it goes on from the checkpoint, residuals included.
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
from byte_gpt.model import BYTES, ByteGPT, loss_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics.classification import MulticlassAccuracy

from lightning_dist import compress_ddp


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--steps", type=int, default=100, help="steps of this start")
    parser.add_argument("--folder", type=Path, default=Path("ddp_out"))
    arguments = parser.parse_args()

    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    dist.init_process_group("gloo")  # "nccl" on GPUs, and the model and DDP on the local one
    torch.manual_seed(7)
    data = StdlibBytes()
    data.setup("fit")
    sampler = DistributedSampler(data.train_set, drop_last=True)
    loader = DataLoader(data.train_set, batch_size=data.batch_size, sampler=sampler)
    model = DistributedDataParallel(ByteGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = compress_ddp(model, arguments.codec)  # after DDP, before the first backward pass

    checkpoint, first = arguments.folder / "last.pt", 0
    if checkpoint.exists():
        saved: dict[str, Any] = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["lightning_dist"])  # the same on every rank
        first = saved["step"]

    arguments.folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project="lightning_dist",
        dir=arguments.folder,
        config={"lightning_dist": handle.comm_config()},
        mode="disabled" if dist.get_rank() else None,
    )
    accuracy = MulticlassAccuracy(BYTES, average="micro")
    step = first
    sampler.set_epoch(first)
    for step, window in enumerate(loader, first + 1):
        logits, following = model(window[:, :-1]), window[:, 1:]
        loss = loss_of(logits, following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        accuracy.update(logits.detach().flatten(0, 1), following.flatten())
        ratio = handle.comm_stats()["last_step"]["ratio"]
        run.log({"loss": loss.item(), "comm/compression_ratio": ratio}, step=step)
        if step == first + arguments.steps:
            break

    mean = accuracy.compute()  # collective, as state_dict: over the samples of all ranks
    run.log({"accuracy": mean}, step=step)
    run.finish()
    residuals = handle.state_dict()  # rank 0 gets it
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "lightning_dist": residuals, "step": step}, checkpoint)
        ratio = handle.comm_stats()["ratio"]
        print(f"steps {first} to {step}, accuracy {mean:.1%}, {ratio:.1f} times fewer bytes")
    handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
