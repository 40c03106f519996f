"""Manual optimisation: two networks in one DDP module, one of them in every backward pass."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from scenarios.catalogue import Facts, scenario
from scenarios.fitting import VARIANTS, fit, residuals
from scenarios.models import WIDTH, Regression, loader


class GAN(L.LightningModule):
    """Remembers both networks' residuals around every backward pass."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.generator = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
        self.backwards: list[Facts] = []

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        of_critic, of_generator = self.optimizers()

        self.toggle_optimizer(of_critic)
        loss = self.critic(self.generator(noise).detach()).mean() - self.critic(real).tanh().mean()
        self._step("critic", loss, of_critic)
        self.untoggle_optimizer(of_critic)

        self.toggle_optimizer(of_generator)
        self._step("generator", -self.critic(self.generator(noise)).mean(), of_generator)
        self.untoggle_optimizer(of_generator)

    def _step(self, name: str, loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        before = residuals(self.trainer.strategy) if self._ours() else {}
        self.manual_backward(loss)
        after = residuals(self.trainer.strategy) if self._ours() else {}
        self.backwards.append({"network": name, "before": before, "after": after})
        optimizer.step()

    def _ours(self) -> bool:
        return hasattr(self.trainer.strategy, "comm_stats")

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.critic.parameters(), lr=0.01),
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
        ]

    def train_dataloader(self) -> Any:
        return loader(4)


@scenario
def gan() -> Facts:
    facts = {}
    for name, strategy in VARIANTS.items():
        model = GAN()
        facts[name] = fit(model, strategy(find_unused_parameters=True))
        facts[name]["backwards"] = model.backwards
    return facts


class Manual(Regression):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


@scenario
def manual_static_graph() -> Facts:
    """Lightning itself starts the reduction of the first step here."""
    facts = {}
    for name, strategy in VARIANTS.items():
        facts[name] = fit(Manual(), strategy(static_graph=True))
    return facts
