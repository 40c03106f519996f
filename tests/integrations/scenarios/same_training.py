"""One training through Lightning, Fabric, Accelerate and plain DDP: same seeds, data, codec."""

from __future__ import annotations

from typing import Any

import accelerate
import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_dist import compress_ddp
from lightning_dist.accelerate import CompressedDDPPlugin
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from scenarios.accelerating import forget_accelerators
from scenarios.catalogue import Facts, rank, scenario, world_size
from scenarios.fitting import compressed, make_trainer, parameters
from scenarios.models import Regression, loader

STEPS = 20
CODECS = ("int8", "topk:ratio=0.1")


def net() -> nn.Module:
    return Regression(optimizer="momentum").net


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batches() -> DataLoader[Any]:
    """Of this rank: frameworks deal batches in different ways."""
    everything = loader(STEPS).dataset
    own = list(range(rank(), len(everything), world_size()))
    return DataLoader(torch.utils.data.Subset(everything, own), batch_size=8)


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


class Own(Regression):
    def train_dataloader(self) -> DataLoader[Any]:
        return batches()


def by_lightning(codec: str) -> nn.Module:
    model = Own(optimizer="momentum")
    trainer: L.Trainer = make_trainer(
        compressed(codec), max_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(model)
    assert trainer.global_step == STEPS
    return model.net


def by_fabric(codec: str) -> nn.Module:
    strategy = FabricStrategy(codec, min_compress_numel=0)
    fabric = Fabric(accelerator="cpu", devices=world_size(), strategy=strategy)
    fabric.launch()
    module = net()
    model, optimizer = fabric.setup(module, optimizer_of(module))
    for batch in batches():
        optimizer.zero_grad()
        fabric.backward(loss_of(model, batch))
        optimizer.step()
    for reducer in strategy.reducers:
        reducer.close()
    return module


def by_accelerate(codec: str) -> nn.Module:
    forget_accelerators()
    accelerator = accelerate.Accelerator(cpu=True)
    compression = CompressedDDPPlugin(codec, min_compress_numel=0).attach(accelerator)
    module = net()
    model, optimizer = accelerator.prepare(module, optimizer_of(module))
    for batch in batches():
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
    compression.close()
    forget_accelerators()
    return module


def by_plain_ddp(codec: str) -> nn.Module:
    module = net()
    model, optimizer = DistributedDataParallel(module), optimizer_of(module)
    reducer = compress_ddp(model, codec, min_compress_numel=0)
    for batch in batches():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    assert reducer.comm_stats()["steps"] == STEPS
    reducer.close()
    return module


@scenario
def same_training() -> Facts:
    ways = (by_plain_ddp, by_accelerate, by_fabric, by_lightning)
    facts = {
        codec: {way.__name__: parameters(way(codec)) for way in ways} for codec in (*CODECS, "none")
    }
    return {**facts, "start": parameters(net())}
