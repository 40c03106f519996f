"""A Fabric loop in local steps: workers exchange what they have changed every few steps.

Run it with `python examples/fabric_local_steps.py`; Fabric starts the second process itself. Run it
again and it goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT
from lightning.fabric import Fabric
from torch.nn import functional as F

from lightning_dist.fabric import LocalUpdateStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--method", default="local_sgd")
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of this start")
    parser.add_argument("--folder", type=Path, default=Path("fabric_local_out"))
    arguments = parser.parse_args()

    strategy = LocalUpdateStrategy(arguments.method, sync_every=arguments.sync_every)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
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
        if state["step"] == first + arguments.steps:
            break
    fabric.save(checkpoint, state)
    strategy.updates.finish()  # every worker has the mean of all
    (stats,) = strategy.comm_stats()
    fabric.print(
        f"steps {first} to {state['step']}, loss {loss.item():.3f}, "
        f"{stats['wire_bytes'] / 1e6:.2f} MB sent in {stats['steps']} exchanges"
    )


if __name__ == "__main__":
    main()
