"""The user's own objects: what the blocks of the documents use without making it."""

# ruff: noqa: F401
import os
import pathlib
from contextlib import nullcontext

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightning_dist
from lightning_dist import (
    AsyncCheckpoint,
    BlockCodec,
    CommProfiler,
    ElasticLoop,
    ElasticRestart,
    compress_ddp,
    compress_fsdp,
)
from lightning_dist.codecs import Codec

nodes, gpus_per_node, world_size = 2, 1, 2
WIDTH = 80  # 6,400 elements: enough to be compressed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Regression(L.LightningModule):
    """Stops after three steps, whatever the Trainer was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self(batch[0]).square().mean(), sync_dist=True)

    def on_train_batch_end(self, *args):
        self.trainer.should_stop = self.trainer.global_step >= 3

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return loader

    def val_dataloader(self):
        return loader


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader

    val_dataloader = train_dataloader


data = TensorDataset(torch.randn(12, WIDTH), torch.randn(12, WIDTH))
loader = DataLoader(data, batch_size=2)
module, datamodule, model = Regression(), Data(), Net()
net = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
criterion = nn.functional.mse_loss


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()
