"""The GPT task: the demo's byte-level GPT, smaller, on the sources of Python's standard library.

Ranks train on different packages (a top-level module is a package of one file) and the loss is
taken on whole files that no rank trains on.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.convergence_settings import GptSettings
from examples.byte_gpt.data import ByteWindows, stdlib_files
from examples.byte_gpt.model import ByteGPT
from lightning_dist import OneBitAdam

_VAL_BATCH = 32
_ALL = slice(None)


class GptTask:
    """Model, optimizer, batches of one rank, and the measure of success."""

    metrics: ClassVar[tuple[str, ...]] = ("val_loss",)

    def __init__(self, settings: GptSettings, *, rank: int, world_size: int) -> None:
        self.settings, self._rank, self._world_size = settings, rank, world_size
        files = stdlib_files()
        held_out = files[:: settings.hold_out_every]
        trained = sorted(set(files) - set(held_out))
        mine = shard_files(trained, world_size)[rank]
        context = settings.context
        self._bytes = ByteWindows(mine, context=context, stride=context).bytes
        stride = sum(path.stat().st_size for path in held_out) // settings.val_windows
        validation = ByteWindows(held_out, context=context, stride=max(context, stride))
        self._val = torch.stack([validation[i] for i in range(settings.val_windows)])

    def model(self) -> nn.Module:
        """With weights from torch's global generator."""
        s = self.settings
        return ByteGPT(s.context, d_model=s.d_model, n_layers=s.n_layers, n_heads=s.n_heads)

    def optimizer(
        self, model: nn.Module, *, own_momentum: bool
    ) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """The demo's: AdamW, a linear warm-up, a linear decay; its moments stay in any case."""
        s = self.settings
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=s.lr, betas=(0.9, 0.95), weight_decay=s.weight_decay
        )

        def factor(step: int) -> float:
            decayed = 1 - (1 - s.final_lr) * step / s.steps
            return min((step + 1) / s.warmup_steps, max(s.final_lr, decayed))

        return optimizer, LambdaLR(optimizer, factor)

    def onebit_adam(
        self, model: nn.Module, freeze_step: int, schedule: LambdaLR
    ) -> tuple[OneBitAdam, LambdaLR]:
        """1-bit Adam with the hyperparameters and the schedule of :meth:`optimizer`."""
        s = self.settings
        groups = [
            {key: group[key] for key in ("params", "weight_decay")}
            for group in schedule.optimizer.param_groups
        ]
        optimizer = OneBitAdam(groups, lr=s.lr, betas=(0.9, 0.95), freeze_step=freeze_step)
        return optimizer, LambdaLR(optimizer, schedule.lr_lambdas)

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Endless windows ``(batch, context + 1)`` of this rank's packages."""
        generator = torch.Generator().manual_seed(1000 * seed + self._rank)
        window = torch.arange(self.settings.context + 1)
        last = len(self._bytes) - len(window)
        size = self.settings.batch // self._world_size
        while True:
            starts = torch.randint(last + 1, (size, 1), generator=generator)
            yield self._bytes[starts + window].long()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Nats per byte."""
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def before_step(self, model: nn.Module) -> None:
        """As the demo does."""
        nn.utils.clip_grad_norm_(model.parameters(), self.settings.clip_norm)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, *, part: slice = _ALL) -> dict[str, float]:
        """The mean loss over the fixed validation windows, or over a part of them."""
        windows = self._val[part]
        total = sum(self.loss(model, few).item() * len(few) for few in windows.split(_VAL_BATCH))
        return {"val_loss": total / len(windows)}


def shard_files(files: list[Path], ranks: int) -> list[list[Path]]:
    """Whole packages to ranks, the largest first, each to the rank that has the fewest bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    packages = [list(group) for _, group in groupby(files, lambda f: f.relative_to(root).parts[0])]
    sizes = {id(package): sum(path.stat().st_size for path in package) for package in packages}
    shards: list[list[Path]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for package in sorted(packages, key=lambda package: -sizes[id(package)]):
        lightest = loads.index(min(loads))
        shards[lightest] += package
        loads[lightest] += sizes[id(package)]
    return shards
