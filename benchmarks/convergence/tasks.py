"""What the launcher and the ranks of the convergence benchmark agree on; imports no torch."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import ClassVar

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from examples.byte_gpt.data import ByteWindows, stdlib_files
from examples.byte_gpt.model import ByteGPT
from lightning_dist import OneBitAdam

DDP_ROW = "ddp"
NO_FEEDBACK_SUFFIX = "-noef"
WARM_SUFFIX = "-warm"
ONEBIT_PREFIX = "onebit-adam:"
WARM_SHARE = 0.2
"""Of the steps, after which rows with a warm-up begin to compress, and 1-bit Adam freezes."""

MIN_COMPRESS_NUMEL = 256
"""Codecs leave tensors below some thousand elements alone, which are most of these small models."""


@dataclass(frozen=True, kw_only=True)
class GptSettings:
    """A byte-level GPT like the demo's and how it is trained; the defaults take about 4 s."""

    steps: int = 160  # of which the learning rate's decay takes all but the warm-up
    context: int = 64
    d_model: int = 64
    n_layers: int = 2
    n_heads: int = 4
    batch: int = 16  # windows per step of all ranks together, so more ranks are no more work
    lr: float = 3e-3
    warmup_steps: int = 40  # with 20 the end depends twice as much on the seed
    final_lr: float = 0.1  # share of `lr` at the end; 1: constant after the warm-up
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    hold_out_every: int = 20  # of the files, for validation
    val_windows: int = 256


@dataclass(frozen=True, kw_only=True)
class DigitsSettings:
    """An MLP on scikit-learn's 8 x 8 digits and how it is trained."""

    steps: int = 300
    hidden: int = 128  # of two hidden layers
    batch: int = 64  # images per step of all ranks together
    lr: float = 0.05
    momentum: float = 0.9
    final_lr: float = 0.1
    test_share: float = 0.25
    own_labels: float = 0.8  # share of a rank's images that come from its own labels only


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row of one task: everything but the seed."""

    task: str
    codec: str | None  # None: DDP itself
    error_feedback: bool = True  # False: switched off; True: as the codec has it by default
    warm: bool = False  # uncompressed for the first steps
    onebit: bool = False  # OneBitAdam in place of AdamW
    steps: int | None = None  # None: the task's own

    @property
    def row(self) -> str:
        """The row's name in the table."""
        if self.codec is None:
            return DDP_ROW
        if self.onebit:
            return ONEBIT_PREFIX + self.codec
        suffix = WARM_SUFFIX if self.warm else ""
        return self.codec + suffix + ("" if self.error_feedback else NO_FEEDBACK_SUFFIX)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished training."""

    job: Job
    seed: int
    metrics: Mapping[str, float]
    error_feedback: bool | None  # as it was in effect; None for DDP
    bytes_ratio: float  # fp32 DDP's bytes divided by those sent
    identical: bool  # whether all ranks ended with the same parameters, bit by bit
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A row that did not run, or broke; the other rows go on."""

    job: Job
    reason: str


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


_SPLIT_SEED = 0  # of the split into training, test and ranks: the same in every run
_PIXELS, _CLASSES, _BRIGHTEST = 64, 10, 16.0

Batch = tuple[Tensor, Tensor]


class DigitsTask:
    """Model, optimizer, batches of one rank, and the measures of success."""

    metrics: ClassVar[tuple[str, ...]] = ("test_accuracy", "test_loss")

    def __init__(self, settings: DigitsSettings, *, rank: int, world_size: int) -> None:
        self.settings, self._rank, self._world_size = settings, rank, world_size
        images, labels = load_digits(return_X_y=True)
        inputs = torch.tensor(images, dtype=torch.float32) / _BRIGHTEST
        targets = torch.tensor(labels, dtype=torch.long)
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        tested = round(len(order) * settings.test_share)
        self._test = inputs[order[:tested]], targets[order[:tested]]
        mine = skewed_shard(
            order[tested:],
            targets,
            rank=rank,
            world_size=world_size,
            own_labels=settings.own_labels,
        )
        self._inputs, self._targets = inputs[mine], targets[mine]

    def model(self) -> nn.Module:
        """With weights from torch's global generator."""
        hidden = self.settings.hidden
        return nn.Sequential(
            nn.Linear(_PIXELS, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, _CLASSES),
        )

    def optimizer(
        self, model: nn.Module, *, own_momentum: bool
    ) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """SGD with momentum, a linear decay. own_momentum: the codec has it, the optimizer not."""
        s = self.settings
        momentum = 0.0 if own_momentum else s.momentum
        optimizer = torch.optim.SGD(model.parameters(), lr=s.lr, momentum=momentum)
        decay = LambdaLR(optimizer, lambda step: 1 - (1 - s.final_lr) * step / s.steps)
        return optimizer, decay

    def batches(self, seed: int) -> Iterator[Batch]:
        """Endless samples of this rank's images."""
        generator = torch.Generator().manual_seed(1000 * seed + self._rank)
        size = self.settings.batch // self._world_size
        while True:
            chosen = torch.randint(len(self._targets), (size,), generator=generator)
            yield self._inputs[chosen], self._targets[chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy in nats."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    def before_step(self, model: nn.Module) -> None:
        """Nothing: no clipping here."""

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy in percent and loss on the test images."""
        inputs, targets = self._test
        logits = model(inputs)
        right = (logits.argmax(dim=1) == targets).float().mean().item()
        return {"test_accuracy": 100 * right, "test_loss": F.cross_entropy(logits, targets).item()}


def skewed_shard(
    chosen: Tensor, targets: Tensor, *, rank: int, world_size: int, own_labels: float
) -> Tensor:
    """This rank's part of the images ``chosen``, which are in random order.

    The share ``own_labels`` of all images is sorted by label and cut into one run for each rank;
    the others are dealt out as they come.
    """
    sorted_count = round(len(chosen) * own_labels)
    by_label = chosen[:sorted_count][targets[chosen[:sorted_count]].argsort(stable=True)]
    own = by_label.tensor_split(world_size)[rank]
    common = chosen[sorted_count:].tensor_split(world_size)[rank]
    return torch.cat([own, common])
