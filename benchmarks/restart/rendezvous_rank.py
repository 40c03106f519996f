"""The training of benchmarks/restart/rendezvous.py: STRATEGY FOLDER VICTIM STEP."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_dist  # noqa: F401  (registers the strategy)


class Module(L.LightningModule):
    """64 samples through one layer; the victim dies at its step of the first start."""

    def __init__(self, folder: Path, victim: int, step: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)
        self.mark, self.victim, self.step = folder / "died", victim, step

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        dies = (self.global_rank, index) == (self.victim, self.step)
        if dies and not self.mark.exists():
            self.mark.touch()
            os._exit(3)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    train_dataloader = BoringModel.train_dataloader


def main() -> None:
    strategy, folder, victim, step = sys.argv[1:]
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(Path(folder), int(victim), int(step)))


if __name__ == "__main__":
    main()
