"""Tiny models on fixed data; every rank sees its own half of every batch."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scenarios.world import world_size

WIDTH = 16


class Regression(L.LightningModule):
    """Two layers fitted to a fixed linear map; ``optimizer`` and ``batches`` as a test wants."""

    def __init__(self, hidden: int = 32, *, optimizer: str = "sgd", batches: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH, bias=False)
        )
        self.optimizer, self.batches = optimizer, batches

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x.to(self.dtype)).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.02)
        momentum = 0.9 if self.optimizer == "momentum" else 0.0
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=momentum)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batches)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Finetuning(BaseFinetuning):
    """The first layer is frozen until the second epoch."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(
        self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.1)


def loader(batches: int, *, batch_size: int = 8) -> DataLoader[Any]:
    """``batches`` batches a rank; not shuffled, so a run can be repeated."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batches * world_size() * batch_size, WIDTH, generator=generator)
    y = x @ torch.randn(WIDTH, WIDTH, generator=generator) * 0.3
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)
