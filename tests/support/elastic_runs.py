"""A small training whose every sample, step and random draw can be accounted for."""

import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset

from lightning_dist import ElasticRestart

SIZE, WIDTH = 48, 4
_ATTEMPT = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")


class Numbered(Dataset):
    """Samples that know their number; reading one draws from every generator."""

    def __init__(self, size: int = SIZE, *, noisy: bool = True) -> None:
        self.size, self.noisy = size, noisy

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        if self.noisy:
            x = x + 0.01 * (torch.rand(()) + random.random() + np.random.rand())
        return index, x.float()


class Net(L.LightningModule):
    """Dropout, momentum, two schedulers: everything that a restart could get wrong."""

    def __init__(self, *, noisy: bool = True, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(1)
        drop = nn.Dropout(0.2 if noisy else 0.0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), drop, nn.Tanh(), nn.Linear(8, WIDTH))
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, x = batch
        loss = nn.functional.mse_loss(self.net(x), x.flip(1))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.net(batch[1]).mean() + torch.rand(()).item(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        each_step = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
        return [optimizer], [{"scheduler": each_step, "interval": "step"}]


class ShardedNet(Net):
    """The same under model parallelism."""

    def configure_model(self) -> None:
        tensor = self.device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            parallelize_module(self.net, tensor, {"0": ColwiseParallel(), "3": RowwiseParallel()})
        for part in (self.net[0], self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class Account(L.Callback):
    """Appends the samples of every optimizer step to a file of this rank, when it is done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.before = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        restart = next(c for c in trainer.callbacks if isinstance(c, ElasticRestart))
        if restart.micro_batch is None or restart.micro_batch.weight:
            self.ids += batch[0].tolist()
        if trainer.global_step == self.before:
            return
        note_step(
            self.folder,
            rank=trainer.global_rank,
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            ids=self.ids,
            hash=hash_of(module),
            world=trainer.world_size,
            data=(trainer.distributed_sampler_kwargs or {}).get("rank", trainer.global_rank),
        )
        self.ids = []


def note_step(folder: Path, *, rank: int, **facts: Any) -> None:
    """Append a line to the account of a rank."""
    attempt = [os.environ.get(name, "") for name in _ATTEMPT]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"rank-{rank}.jsonl", "a") as file:
        file.write(json.dumps({**facts, "attempt": attempt, "time": time.time()}) + "\n")


@dataclass(frozen=True)
class Step:
    """One optimizer step as it counts: the last time that it was done."""

    epoch: int
    ids: list[int]
    hashes: set[str]
    world: int


def committed(folder: Path) -> dict[int, Step]:
    """What the accounts of all ranks say, by step."""
    lines = [
        {**json.loads(text), "rank": int(path.stem.split("-")[1])}
        for path in folder.glob("rank-*.jsonl")
        for text in path.read_text().splitlines()
    ]
    last: dict[int, dict[str, Any]] = {}
    for line in sorted(lines, key=lambda line: line["time"]):
        last[line["step"]] = line
    steps = {}
    for step, final in sorted(last.items()):
        same = (final["attempt"], step)
        of = {line["rank"]: line for line in lines if (line["attempt"], line["step"]) == same}
        assert len(of) == final["world"], f"step {step} was done by ranks {sorted(of)} only"
        dealt = {line.get("data", line["rank"]): line["ids"] for line in of.values()}
        parts = [(line.get("data", line["rank"]), line["ids"]) for line in of.values()]
        assert all(dealt[part] == ids for part, ids in parts), "of each part"
        ids = sorted(id for each in dealt.values() for id in each)
        steps[step] = Step(
            final["epoch"], ids, {line["hash"] for line in of.values()}, final["world"]
        )
    return steps


def journal(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 has noted of the starts of a run."""
    lines = (folder / "ckpt" / "elastic" / "rank-0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def hash_of(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(whole(value).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, also of a sharded one; then collective among its shards."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Fault(Exception):
    """What a test lets happen."""


class FailAt(L.Callback):
    """Raises in one hook of one step."""

    def __init__(self, hook: str, step: int, action: Callable[[], None] | None = None) -> None:
        def fail(trainer: L.Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step == step and not trainer.sanity_checking:
                if action is not None:
                    action()
                else:
                    raise Fault(f"{hook} at step {step}")

        setattr(self, hook, fail)


def make_loader(dataset: Dataset | None = None, **arguments: Any) -> DataLoader:
    return DataLoader(dataset or Numbered(), **{"batch_size": 4, "shuffle": True, **arguments})


def quiet_trainer(**arguments: Any) -> L.Trainer:
    """In this process, without a logger, a bar, a table and sanity checks."""
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**{**settings, **arguments})


def fit(
    folder: Path,
    *callbacks: L.Callback,
    loader: Callable[[], Any] = make_loader,
    module: L.LightningModule | None = None,
    validate: bool = True,
    elastic: Mapping[str, Any] | None = None,
    ckpt_path: str | None = None,
    fitting: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> tuple[L.Trainer, L.LightningModule]:
    settings = {"every_n_train_steps": 2, "seed": 5, "writer": "thread", **(elastic or {})}
    restart = ElasticRestart(folder / "ckpt", **settings)
    given = {"callbacks": [Account(folder / "account"), *callbacks, restart], **arguments}
    trainer = quiet_trainer(**{"max_epochs": 3, **given})
    module = module or Net()
    torch.manual_seed(2), random.seed(2), np.random.seed(2)
    validation = make_loader(shuffle=False) if validate else None
    trainer.fit(module, loader(), validation, ckpt_path=ckpt_path, **(fitting or {}))
    return trainer, module


def fit_with_faults(
    folder: Path,
    faults: Iterable[tuple[str, int]],
    make_module: Callable[[], L.LightningModule] = Net,
    **arguments: Any,
) -> tuple[L.Trainer, L.LightningModule]:
    """A run of several starts: each fails at the next (hook, step), and the last one ends."""
    for hook, step in faults:
        with pytest.raises(Fault, match=f"^{hook} at step {step}$"):
            fit(folder, FailAt(hook, step), module=make_module(), **arguments)
    return fit(folder, module=make_module(), **arguments)
