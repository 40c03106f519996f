"""Sharded models that take local steps under a Trainer, on two nodes of two ranks."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from fsdp_models import weights
from model_parallel_runs import BATCHES, WIDTH, Module, fitted, same, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import LocalUpdateModelParallelStrategy
from lightning_dist.checkpoint.reading import load
from lightning_dist.sync.networks import DIMENSIONS

KEY = "lightning_dist_local_updates"
SCHEDULE: dict[str, Any] = {
    "sync_every": 3,
    "overlap_steps": 2,
    "mixing": 0.25,
    "min_compress_numel": 0,
}
"""After an epoch of 4 steps an exchange is under way."""


def ours(**given: Any) -> LocalUpdateModelParallelStrategy:
    return LocalUpdateModelParallelStrategy(**{**SCHEDULE, **given})


class Normed(Module):
    """Each rank has running statistics of its own."""

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        super().configure_model()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.norm(batch[0])], batch_idx)


class Watched(L.Callback):
    """What this rank has where a checkpoint may be written, at the start, and in validations."""

    def __init__(self) -> None:
        self.own: list[list[Tensor]] = []
        self.validated: list[list[Tensor]] = []
        self.start: dict[str, Tensor] = {}
        self.moments: list[Tensor] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start = {n: whole(p) for n, p in pl_module.named_parameters()}
        states = trainer.optimizers[0].state.values()
        self.moments = [whole(each["exp_avg"]) for each in states if "exp_avg" in each]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.own.append(held_by(pl_module))

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any
    ) -> None:
        self.validated.append(weights(pl_module))


def held_by(module: L.LightningModule) -> list[Tensor]:
    return [*weights(module), *(each.detach().clone() for each in module.buffers())]


def watch(
    strategy: Any, module: Module | None = None, *callbacks: Any, **given: Any
) -> tuple[L.Trainer, Module, Watched]:
    watched = Watched()
    callbacks = (*callbacks, watched)
    found, module = fitted(strategy, module or Normed(), callbacks=[*callbacks], **given)
    return found, module, watched


def all_same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return len(a) == len(b) and len(a) > 0 and all(map(same, a, b))


def begun_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=DIMENSIONS)


class Unequal(Module):
    """Batches of one to four samples, by rank."""

    def train_dataloader(self) -> Any:
        size = 1 + dist.get_rank()
        generator = torch.Generator().manual_seed(dist.get_rank())
        data = torch.randn(BATCHES * size, WIDTH, generator=generator)
        return DataLoader(TensorDataset(data), batch_size=size)


def state_of(path: Path) -> dict[str, Any]:
    """State of local updates in a checkpoint of any kind."""
    if (path / "meta.pt").is_file():
        path = path / "meta.pt"
    state: dict[str, Any] = load(str(path))
    return state[KEY]


def anchor_of(path: Path) -> dict[str, Tensor]:
    return state_of(path)["shared"]["anchor"]
