"""Fabric: the training loop is the user's."""

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from scenarios.fitting import digest, parameters
from scenarios.models import Regression, loader
from scenarios.world import Facts


class Run:
    """A model under Fabric, trained step by step on rank-dependent data."""

    def __init__(
        self,
        strategy: Any = "compressed_ddp",
        *,
        accumulate: int = 1,
        compiled: bool = False,
        plugins: Any = None,
        momentum: float = 0.9,
    ) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugins)
        self.fabric.launch()
        model = Regression(hidden=256).net  # weights of 4096 elements: compressed by default
        if compiled:
            model = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.accumulate = accumulate
        data = self.fabric.setup_dataloaders(loader(8))
        self.batches = iter(list(data))
        self.digests: list[str] = []

    def train(self, batches: int) -> None:
        for index in range(batches):
            x, y = next(self.batches)
            holds = (index + 1) % self.accumulate != 0
            with self.fabric.no_backward_sync(self.model, enabled=holds):
                self.fabric.backward(nn.functional.mse_loss(self.model(x), y) / self.accumulate)
            if not holds:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.digests.append(digest(self.model))

    def state(self) -> Facts:
        return {"model": self.model, "optimizer": self.optimizer}

    def facts(self) -> Facts:
        ours = hasattr(self.fabric.strategy, "reducers")
        reducer = self.fabric.strategy.reducers[0] if ours else None
        names = reducer.residuals if ours else []
        return {
            "parameters": parameters(self.model),
            "digests": self.digests,
            "stats": dict(self.fabric.strategy.comm_stats()[0]) if ours else None,
            "residuals": {name: reducer.residuals[name].clone() for name in names},
        }
