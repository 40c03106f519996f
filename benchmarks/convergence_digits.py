"""The digits task: an MLP on scikit-learn's 8 x 8 images, with ranks that see different digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.convergence_settings import DigitsSettings

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
