"""Compressed gradients, elastic restart, checkpoints and a profile in a loop of Accelerate's.

    lightning-dist launch --nproc-per-node 2 examples/accelerate_engines.py

Kill a rank, or all of it and start it again with another number: it goes on, every sample once. On
CPU set ACCELERATE_USE_CPU=true. Under plain torchrun give --max-restarts.
"""

from __future__ import annotations

import argparse
import logging
import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import CommProfiler, ElasticLoop, compress_ddp, init_process_group
from lightning_dist.accelerate import AsyncStateCheckpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", default="accelerate_run")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = arguments.folder

    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    init_process_group()  # Accelerator() takes it; over a store without the dead of earlier starts
    accelerator = Accelerator(log_with="wandb")
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)  # the loader stays as it is
    if accelerator.num_processes > 1:
        compress_ddp(model, "int8", compile_kernels=False)

    elastic = ElasticLoop(
        f"{folder}/elastic",  # what a restart goes on from
        loader=loader,
        state={"model": model, "optimizer": optimizer},
        every_n_train_steps=5,
        device=accelerator.device,
    )
    with (
        AsyncStateCheckpointer(accelerator) as for_others,  # what accelerator.load_state reads
        CommProfiler(model, dirpath=f"{folder}/profile"),
        elastic as loop,
    ):
        run = {"dir": folder, "id": loop.run_id, "resume": "allow"}  # the same after a restart
        accelerator.init_trackers("lightning_dist", init_kwargs={"wandb": run})
        for epoch in loop.epochs(arguments.epochs):
            for inputs, targets in loop.batches():
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loop.scale_loss(loss))
                if loop.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
                    loop.step_done()
            for_others.save_state(f"{folder}/epochs/epoch-{epoch}")
            accelerator.log({"loss": loss.item(), **loop.metrics()}, step=loop.steps)
            accelerator.print(f"epoch {epoch}: step {loop.steps}, loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
