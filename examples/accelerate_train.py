r"""Compressed data-parallel training with Accelerate, with checkpoints to go on from.

    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 \
        examples/accelerate_train.py

Start it again: it goes on from the last checkpoint, residuals of every rank included.
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.regression import MeanSquaredError

from lightning_dist.accelerate import Accelerator, CompressedDDPPlugin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--epochs", type=int, default=3, help="of this start")
    parser.add_argument("--folder", default="accelerate_out")
    arguments = parser.parse_args()

    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    set_seed(7)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        log_with="wandb",
        kwargs_handlers=[CompressedDDPPlugin(arguments.codec)],  # the only line that is ours
    )
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(1024, 64)
    data = DataLoader(TensorDataset(x, x.roll(1, dims=1)), batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    trackers = {"wandb": {"dir": arguments.folder}}
    accelerator.init_trackers("lightning_dist", init_kwargs=trackers)
    error = MeanSquaredError().to(accelerator.device)
    saved = Path(arguments.folder, "state")
    if saved.exists():
        accelerator.load_state(str(saved))
        accelerator.print(f"going on from {saved}")
    for epoch in range(arguments.epochs):
        for batch, target in data:
            with accelerator.accumulate(model):
                prediction = model(batch)
                accelerator.backward(nn.functional.mse_loss(prediction, target))
                optimizer.step()
                optimizer.zero_grad()
            error.update(prediction.detach(), target)
        mean = error.compute()  # collective: over the samples of all ranks
        error.reset()
        accelerator.log({"mean_squared_error": mean, **accelerator.compression.metrics()})
        accelerator.print(f"epoch {epoch}: mean squared error {mean:.4f}")
        accelerator.save_state(str(saved))
    for stats in accelerator.compression.comm_stats():
        accelerator.print(
            f"{stats['steps']} steps, {stats['wire_bytes'] / 1e6:.2f} MB sent by rank 0, "
            f"{stats['ratio']:.1f} times less than DDP"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
