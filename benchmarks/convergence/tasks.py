"""What is trained: models, data and optimizers."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from examples.byte_gpt.data import ByteWindows, stdlib_files
from examples.byte_gpt.model import ByteGPT
from lightning_dist import OneBitAdam


class Task:
    """Model, optimizer, batches of one rank, and the measures of success.

    Subclasses have `model`, with weights from torch's global generator; `optimizer` with its
    schedule, the same for all rows, but for a codec with momentum of its own; `loss`; and, where an
    end is looked at, `evaluate`: metrics on data that no rank trains on.
    """

    samples: int  # that this rank has to draw from
    _inputs: Tensor
    _targets: Tensor

    def __init__(self, settings: Any, *, rank: int, world_size: int) -> None:
        self.settings, self._rank = settings, rank
        self._size = settings.batch // world_size

    def batch(self, chosen: Tensor) -> Any:
        """Some samples of this rank, by their numbers."""
        return self._inputs[chosen], self._targets[chosen]

    def batches(self, seed: int) -> Iterator[Any]:
        """Endless batches of this rank's data."""
        generator = torch.Generator().manual_seed(1000 * seed + self._rank)
        while True:
            yield self.batch(torch.randint(self.samples, (self._size,), generator=generator))

    def before_step(self, model: nn.Module) -> None:
        """Between backward and the optimizer's step."""

    def blocks(self, model: Any) -> Iterable[nn.Module]:
        """Parts of the model that are sharded by themselves."""
        return model


def make_task(name: str, chosen: Mapping[str, Any], *, rank: int, world_size: int) -> Task:
    """A task with its data; ``chosen``: settings other than its own."""
    kind, settings = {
        "gpt": (GptTask, GptSettings),
        "digits": (DigitsTask, DigitsSettings),
        "linear": (LinearTask, LinearSettings),
    }[name]
    return kind(settings(**chosen), rank=rank, world_size=world_size)


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
    clip_norm: float = 1.0
    hold_out_every: int = 20  # of the files, for validation
    val_windows: int = 256


DEMO_GPT = {
    "context": 64,
    "d_model": 192,
    "n_layers": 3,
    "n_heads": 4,
    "batch": 8,
    "lr": 1e-3,  # of 1, 1.5 and 2e-3 the one with which fp32 DDP is fastest and smoothest
    "warmup_steps": 20,
    "final_lr": 1.0,  # no row's end is known beforehand
    "val_windows": 64,
}
"""Settings of a GPT as large as the demo's: 1.4 M parameters, 5.6 MB of gradients."""
_VAL_BATCH = 32


class GptTask(Task):
    """The demo's GPT on Python's standard library, of which each rank has other packages."""

    def __init__(self, settings: GptSettings, *, rank: int, world_size: int) -> None:
        super().__init__(settings, rank=rank, world_size=world_size)
        files = stdlib_files()
        held_out = files[:: settings.hold_out_every]
        trained = sorted(set(files) - set(held_out))
        mine = shard_files(trained, world_size)[rank]
        context = settings.context
        self._bytes = ByteWindows(mine, context=context, stride=context).bytes
        self.samples = len(self._bytes) - context
        stride = sum(path.stat().st_size for path in held_out) // settings.val_windows
        validation = ByteWindows(held_out, context=context, stride=max(context, stride))
        self._val = torch.stack([validation[i] for i in range(settings.val_windows)])

    def blocks(self, model: Any) -> Iterable[nn.Module]:
        return model.blocks

    def model(self) -> nn.Module:
        s = self.settings
        return ByteGPT(s.context, d_model=s.d_model, n_layers=s.n_layers, n_heads=s.n_heads)

    def optimizer(
        self,
        model: nn.Module,
        *,
        own_momentum: bool,
        rate: float = 1.0,
        freeze_step: int | None = None,
    ) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """The demo's AdamW, a linear warm-up, a linear decay; freeze_step: of 1-bit Adam instead.

        rate: factor of the learning rate. The moments stay in any case.
        """
        s = self.settings
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        onebit = freeze_step is not None
        adam = partial(OneBitAdam, freeze_step=freeze_step) if onebit else torch.optim.AdamW

        def factor(step: int) -> float:
            decayed = 1 - (1 - s.final_lr) * step / s.steps
            return min((step + 1) / s.warmup_steps, max(s.final_lr, decayed))

        optimizer = adam(groups, lr=s.lr * rate, betas=(0.9, 0.95))
        return optimizer, LambdaLR(optimizer, factor)

    def batch(self, chosen: Tensor) -> Tensor:
        """Windows ``(batch, context + 1)``."""
        return self._bytes[chosen[:, None] + torch.arange(self.settings.context + 1)].long()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Nats per byte."""
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def before_step(self, model: nn.Module) -> None:
        """As the demo does."""
        nn.utils.clip_grad_norm_(model.parameters(), self.settings.clip_norm)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The mean loss over the fixed validation windows."""
        parts = self._val.split(_VAL_BATCH)
        total = sum(self.loss(model, windows).item() * len(windows) for windows in parts)
        return {"val_loss": total / len(self._val)}


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


_SPLIT_SEED = 0  # of the split into training, test and ranks: the same in every run
_PIXELS, _CLASSES, _BRIGHTEST = 64, 10, 16.0

Batch = tuple[Tensor, Tensor]


class DigitsTask(Task):
    """An MLP on digits, of which each rank has mostly its own labels."""

    def __init__(self, settings: DigitsSettings, *, rank: int, world_size: int) -> None:
        super().__init__(settings, rank=rank, world_size=world_size)
        images, labels = load_digits(return_X_y=True)
        inputs = torch.tensor(images, dtype=torch.float32) / _BRIGHTEST
        targets = torch.tensor(labels, dtype=torch.long)
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        tested = round(len(order) * settings.test_share)
        self._test = inputs[order[:tested]], targets[order[:tested]]
        # The images sorted by label and cut into one run for each rank; the others as they come.
        others = order[tested:]
        count = round(len(others) * settings.own_labels)
        by_label = others[:count][targets[others[:count]].argsort(stable=True)]
        parts = by_label, others[count:]
        mine = torch.cat([part.tensor_split(world_size)[rank] for part in parts])
        self._inputs, self._targets = inputs[mine], targets[mine]
        self.samples = len(mine)

    def model(self) -> nn.Module:
        hidden = self.settings.hidden
        first, second = nn.Linear(_PIXELS, hidden), nn.Linear(hidden, hidden)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(hidden, _CLASSES))

    def optimizer(
        self, model: nn.Module, *, own_momentum: bool, rate: float = 1.0
    ) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """SGD, a linear decay; with momentum, unless the codec has it."""
        s = self.settings
        momentum = 0.0 if own_momentum else s.momentum
        optimizer = torch.optim.SGD(model.parameters(), lr=s.lr * rate, momentum=momentum)
        decay = LambdaLR(optimizer, lambda step: 1 - (1 - s.final_lr) * step / s.steps)
        return optimizer, decay

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy in percent and loss on the test images."""
        inputs, targets = self._test
        logits = model(inputs)
        right = (logits.argmax(dim=1) == targets).float().mean().item()
        return {"test_accuracy": 100 * right, "test_loss": F.cross_entropy(logits, targets).item()}


@dataclass(frozen=True, kw_only=True)
class LinearSettings:
    """Layers with 42 MB of gradients, for times of steps."""

    batch: int  # of all ranks together
    steps: int = 1
    width: int = 1024
    layers: int = 10
    samples: int = 64  # made up, of each rank
    lr: float = 1e-3


class LinearTask(Task):
    """Layers that are all alike, on made-up data."""

    def __init__(self, settings: LinearSettings, *, rank: int, world_size: int) -> None:
        super().__init__(settings, rank=rank, world_size=world_size)
        generator = torch.Generator().manual_seed(rank)
        self.samples = settings.samples
        data = torch.randn(2, settings.samples, settings.width, generator=generator)
        self._inputs, self._targets = data

    def model(self) -> nn.Module:
        width = self.settings.width
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(self.settings.layers)))

    def optimizer(self, model: nn.Module, **_: Any) -> tuple[torch.optim.Optimizer, LambdaLR]:
        optimizer = torch.optim.SGD(model.parameters(), lr=self.settings.lr)
        return optimizer, LambdaLR(optimizer, lambda step: 1.0)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return (model(inputs) - targets).square().sum(dim=1).mean()
