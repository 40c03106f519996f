r"""Local steps with Accelerate: workers exchange what they have changed every few steps.

    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 \
        examples/accelerate_local_steps.py

Start it again: it goes on from the last checkpoint, which has the state of every worker.
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist.accelerate import local_updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", default="local_sgd")
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3, help="of this start")
    parser.add_argument("--folder", default="accelerate_local_out")
    arguments = parser.parse_args()

    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    set_seed(7)
    accelerator = Accelerator(gradient_accumulation_steps=2, log_with="wandb")
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(1024, 64)
    data = DataLoader(TensorDataset(x, x.roll(1, dims=1)), batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    updates = local_updates(
        accelerator, model, optimizer, method=arguments.method, sync_every=arguments.sync_every
    )
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    trackers = {"wandb": {"dir": arguments.folder}}
    accelerator.init_trackers("lightning_dist", init_kwargs=trackers)
    saved = Path(arguments.folder, "state")
    if saved.exists():
        accelerator.load_state(str(saved))
        accelerator.print(f"going on from step {updates.attempted}")
    for epoch in range(arguments.epochs):
        for batch, target in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                updates.step()  # every fourth one exchanges
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        sent = {"comm/total_wire_bytes": updates.comm_stats()["wire_bytes"]}
        accelerator.log({"loss": mean, **updates.metrics(), **sent}, step=updates.attempted)
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")
        accelerator.save_state(str(saved))
    updates.finish()  # every worker has the mean of all
    stats = updates.comm_stats()
    accelerator.print(f"{stats['wire_bytes'] / 1e6:.2f} MB sent in {stats['steps']} exchanges")
    updates.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
