"""A Fabric loop with compressed gradients: accumulation, metrics, and a checkpoint with residuals.

Run it with `python examples/fabric_train.py`; Fabric starts the second process itself. Run it again
and it goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from byte_gpt.data import StdlibBytes
from byte_gpt.model import BYTES, ByteGPT, loss_of
from lightning.fabric import Fabric
from lightning.pytorch.loggers import WandbLogger
from torchmetrics.classification import MulticlassAccuracy

from lightning_dist.fabric import CompressedDDPStrategy

ACCUMULATE = 2
LOG_EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of this start")
    parser.add_argument("--folder", type=Path, default=Path("fabric_out"))
    arguments = parser.parse_args()

    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    strategy = CompressedDDPStrategy(arguments.codec)  # or its name: strategy="compressed_ddp"
    logger = WandbLogger(project="lightning_dist", save_dir=arguments.folder)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, loggers=logger)
    fabric.launch()
    fabric.seed_everything(7)

    data = StdlibBytes()
    data.setup("fit")
    loader = fabric.setup_dataloaders(data.train_dataloader())
    gpt = ByteGPT()
    model, optimizer = fabric.setup(gpt, torch.optim.AdamW(gpt.parameters(), lr=1e-3))
    accuracy = MulticlassAccuracy(BYTES, average="micro")
    state = {"model": model, "optimizer": optimizer, "step": 0}
    checkpoint = arguments.folder / "last.ckpt"
    if checkpoint.exists():
        fabric.load(checkpoint, state)  # residuals of all ranks are in it
    fabric.logger.log_hyperparams({"lightning_dist": strategy.comm_config()})

    first = state["step"]
    for number, window in enumerate(loader, 1):
        syncs = number % ACCUMULATE == 0
        with fabric.no_backward_sync(model, enabled=not syncs):  # no exchange meanwhile
            logits, following = model(window[:, :-1]), window[:, 1:]
            fabric.backward(loss_of(logits, following) / ACCUMULATE)
        accuracy.update(logits.detach().flatten(0, 1), following.flatten())
        if not syncs:
            continue
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] % LOG_EVERY == 0:
            (stats,) = strategy.comm_stats()  # one mapping for each module
            metrics = {
                "accuracy": accuracy.compute(),  # collective: over the samples of all ranks
                "comm/compression_ratio": stats["last_step"]["ratio"],
            }
            fabric.log_dict(metrics, step=state["step"])
        if state["step"] == first + arguments.steps:
            break
    fabric.save(checkpoint, state)
    fabric.logger.finalize("success")  # Fabric leaves that to the loop
    (stats,) = strategy.comm_stats()
    mean = accuracy.compute()
    fabric.print(
        f"steps {first} to {state['step']}, accuracy {mean:.1%}, {stats['ratio']:.1f} times fewer "
        "bytes"
    )


if __name__ == "__main__":
    main()
