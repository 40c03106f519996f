"""Trainings of a sharded model under a Trainer, for tests of the model-parallel strategies."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from fsdp_models import mesh_of
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import CompressedModelParallelStrategy

WIDTH = 18
BATCHES = 4


class Module(L.LightningModule):
    """Sharded over the data-parallel dimension; ``native``: by HSDP, with a mesh of its own."""

    def __init__(self, *, native: bool = False, optimizer: Any = torch.optim.Adam, **given: Any):
        super().__init__()
        self.native, self.given, self.optimizer = native, given, optimizer
        self.blocks: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        torch.manual_seed(3)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        ]
        self.blocks = nn.Sequential(*blocks)
        mesh = mesh_of(2, 2) if self.native else self.device_mesh["data_parallel"]
        for block in blocks:
            if self.device_mesh["tensor_parallel"].size() > 1:
                how = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(block, self.device_mesh["tensor_parallel"], how)
            fully_shard(block, mesh=mesh, **self.given)
        fully_shard(self.blocks, mesh=mesh, **self.given)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        loss = (self.blocks(x) - x.flip(-1)).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.blocks(batch[0])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        count = 4 * BATCHES * 2
        data = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(data), batch_size=2, shuffle=False)

    val_dataloader = train_dataloader


class NativeHSDP(ModelParallelStrategy):
    """Accumulates as torch's HSDP can: without the reduction between replicas."""

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        net = self.lightning_module.blocks
        net.set_requires_all_reduce(False)
        yield
        net.set_requires_all_reduce(True)


class Memory(DummyLogger):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.metrics.update(metrics)


def ours(codec: str = "int8", **given: Any) -> CompressedModelParallelStrategy:
    return CompressedModelParallelStrategy(codec, min_compress_numel=0, **given)


def trainer(strategy: Any, **given: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": 2}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"devices": dist_size(), "limit_val_batches": 0}
    return L.Trainer(strategy=strategy, **{**quiet, **given})


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def fitted(strategy: Any, module: Module | None = None, **given: Any) -> tuple[L.Trainer, Module]:
    module = module or Module()
    path = given.pop("ckpt_path", None)
    found = trainer(strategy, **given)
    found.fit(module, ckpt_path=path)
    return found, module


def held(strategy: Any) -> list[Tensor]:
    residuals = strategy._reducer.residuals
    return [residuals[name] for name in sorted(residuals)]


def parallelize(net: nn.Module, mesh: Mapping[str, DeviceMesh] | DeviceMesh) -> nn.Module:
    for block in net:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])
