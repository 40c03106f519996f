"""A Fabric loop in local steps: workers exchange what they have changed every few steps.

Run it with `python examples/fabric_local_steps.py`; Fabric starts the second process itself. Run it
again and it goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT
from lightning.fabric import Fabric
from lightning.pytorch.loggers import WandbLogger
from torch.nn import functional as F

from lightning_dist.fabric import LocalUpdateStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--method", default="local_sgd")
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of this start")
    parser.add_argument("--folder", type=Path, default=Path("fabric_local_out"))
    arguments = parser.parse_args()

    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    strategy = LocalUpdateStrategy(arguments.method, sync_every=arguments.sync_every)
    logger = WandbLogger(project="lightning_dist", save_dir=arguments.folder)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, loggers=logger)
    fabric.launch()
    fabric.seed_everything(7)

    data = StdlibBytes()
    data.setup("fit")
    loader = fabric.setup_dataloaders(data.train_dataloader())
    gpt = ByteGPT()
    model, optimizer = fabric.setup(gpt, torch.optim.AdamW(gpt.parameters(), lr=1e-3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    checkpoint = arguments.folder / "last.ckpt"
    if checkpoint.exists():
        fabric.load(checkpoint, state)  # what every worker had of its own is in it

    first = state["step"]
    for window in loader:
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        fabric.backward(loss)
        optimizer.step()  # every fourth one exchanges
        optimizer.zero_grad()
        state["step"] += 1
        fabric.log_dict({"loss": loss, **strategy.updates.metrics()}, step=state["step"])
        if state["step"] == first + arguments.steps:
            break
    fabric.save(checkpoint, state)
    strategy.updates.finish()  # every worker has the mean of all
    (stats,) = strategy.comm_stats()
    fabric.log("comm/total_wire_bytes", stats["wire_bytes"], step=state["step"])
    fabric.logger.finalize("success")  # Fabric leaves that to the loop
    fabric.print(
        f"steps {first} to {state['step']}, loss {loss.item():.3f}, "
        f"{stats['wire_bytes'] / 1e6:.2f} MB sent in {stats['steps']} exchanges"
    )


if __name__ == "__main__":
    main()
