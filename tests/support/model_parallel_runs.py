"""Trainings of a sharded model under a Trainer and Fabric, and what tests watch and plant there."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from elastic_runs import FailAt, Fault, Numbered, ShardedNet, make_loader, quiet_trainer
from elastic_runs import fit as elastic_fit
from fsdp_models import mesh_of, weights
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
from lightning_dist.checkpoint.snapshot.sharded_state import LazyState

WIDTH = 18
BATCHES = 4


class Module(L.LightningModule):
    """Sharded over the data-parallel dimension.

    Args:
        native: by HSDP, with a mesh of its own.
        is_whole: it is not sharded.
    """

    def __init__(
        self,
        *,
        native: bool = False,
        is_whole: bool = False,
        optimizer: Any = torch.optim.Adam,
        **given: Any,
    ) -> None:
        super().__init__()
        self.native, self.is_whole, self.given, self.optimizer = native, is_whole, given, optimizer
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
        if self.is_whole:
            return
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
    quiet = {"enable_checkpointing": False, "max_epochs": 2, "limit_val_batches": 0}
    return quiet_trainer(strategy=strategy, **{**quiet, "devices": dist_size(), **given})


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
    residuals = strategy.sync.reducer.residuals
    return [residuals[name] for name in sorted(residuals)]


def parallelize(net: nn.Module, mesh: Mapping[str, DeviceMesh] | DeviceMesh) -> nn.Module:
    for block in net:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])


class FabricRun:
    """A loop under Fabric; where a step has several micro-batches, gradients are clipped."""

    def __init__(self, strategy: Any, *, micro_batches: int = 1, **given: Any) -> None:
        self.strategy, self.micro_batches = strategy, micro_batches
        self.fabric = L.Fabric(accelerator="cpu", devices=4, strategy=strategy, **given)
        self.fabric.launch()
        self.model: Any = self.fabric.setup_module(self.net())
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer: Any = self.fabric.setup_optimizers(optimizer)
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    @staticmethod
    def net() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise((WIDTH, 2 * WIDTH, WIDTH))))

    @staticmethod
    def loss(net: Any, step: int, number: int = 0) -> Tensor:
        seed = 4 * step + dist.get_rank() + 1000 * number
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss: Tensor = (net(x) - x.flip(-1)).square().mean()
        return loss

    def train(self, steps: int, *, native: bool = False) -> list[list[Tensor]]:
        """Weights after every step; ``native``: the model is that of HSDP."""
        found = []
        for _ in range(steps):
            for number in range(self.micro_batches):
                last = number == self.micro_batches - 1
                if native:
                    self.model.set_requires_all_reduce(last)
                sync = self.fabric.no_backward_sync(self.model, enabled=not last)
                with nullcontext() if native else sync:
                    self.fabric.backward(self.loss(self.model, self.state["step"], number))
            if self.micro_batches > 1:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state["step"] += 1
            found.append(weights(self.model))
        return found


FAULTS = {
    "on_after_backward": 1,
    "on_before_optimizer_step": 3,
    "on_train_batch_end": 5,
    "on_validation_batch_end": 6,
    "on_train_epoch_end": 6,
    "on_train_end": 9,
}
"""Optimizer steps before each hook at which a run fails, on all ranks."""


def elastic_start(
    folder: Path,
    strategy: Any,
    *callbacks: L.Callback,
    fault: str = "",
    noisy: bool = True,
    loader: Any = None,
    batch_size: int = 4,
) -> L.LightningModule:
    """The module of a start of a run of 9 steps, which ends at a hook if it is to fail."""
    module = ShardedNet(noisy=noisy)
    planted = [FailAt(fault, FAULTS[fault])] if fault else []
    expected = pytest.raises(Fault, match=f"^{fault} at step") if fault else nullcontext()
    with expected:
        elastic_fit(
            folder,
            *callbacks,
            *planted,
            loader=loader or (lambda: make_loader(Numbered(noisy=noisy), batch_size=batch_size)),
            module=module,
            strategy=strategy,
            devices=dist_size(),
            elastic={"format": "sharded"},
        )
    dist.barrier()
    return module


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.detach().full_tensor().clone()
    return found


def watch_reads(patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each part of a tensor that is read by itself."""
    read: list[int] = []
    usual = LazyState.run

    def run(self: LazyState, value: Tensor, start: int, numel: int) -> Tensor:
        read.append(numel * value.element_size())
        return usual(self, value, start, numel)

    patch.setattr(LazyState, "run", run)
    return read


class Reshaped(torch.optim.SGD):
    """Keeps something of another shape than its parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["column"] = parameter.detach().unsqueeze(-1)
        return loss
