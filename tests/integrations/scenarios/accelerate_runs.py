"""Models under Accelerate with a CompressedDDPPlugin, trained step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import accelerate
import torch
from torch import nn

from lightning_dist.accelerate import Accelerator, CompressedDDPPlugin
from scenarios.accelerating import forget_accelerators
from scenarios.catalogue import Facts, rank, world_size
from scenarios.fitting import digest, parameters
from scenarios.models import Regression, loader

TOPK = CompressedDDPPlugin("topk:ratio=0.1", min_compress_numel=0)


class Run:
    """Models under Accelerate, trained step by step on rank-dependent data.

    Args:
        plugin: None for plain DDP.
        by_hand: attach it to Accelerate's own Accelerator.
        attach: called with that Accelerator before it prepares anything.
    """

    def __init__(
        self,
        plugin: CompressedDDPPlugin | None = TOPK,
        *,
        by_hand: bool = True,
        attach: Callable[[Any], object] = lambda accelerator: None,
        handlers: Sequence[Any] = (),
        scaler: Any = None,
        models: int = 1,
        optimizer: Any = torch.optim.SGD,
        **arguments: Any,
    ) -> None:
        forget_accelerators()
        given = {"cpu": True, **arguments}
        if by_hand:
            self.accelerator = accelerate.Accelerator(kwargs_handlers=list(handlers), **given)
            self.compression = None if plugin is None else plugin.attach(self.accelerator)
        else:
            self.accelerator = Accelerator(kwargs_handlers=[*handlers, plugin], **given)
            self.compression = self.accelerator.compression
        attach(self.accelerator)
        if scaler is not None:
            self.accelerator.scaler = scaler  # Accelerate makes one on GPUs only
        plain = [Regression(hidden=256).net for _ in range(models)]
        steps = [optimizer(model.parameters(), lr=0.1) for model in plain]
        prepared = self.accelerator.prepare(*plain, *steps)
        self.models, self.optimizers = prepared[:models], prepared[models:]
        batches = list(loader(8))
        self.batches = iter(batches[rank() :: world_size()] + batches[rank() :: world_size()])
        self.digests: list[str] = []

    def train(self, batches: int) -> None:
        for _ in range(batches):
            x, y = next(self.batches)
            with self.accelerator.accumulate(*self.models):
                loss = sum(nn.functional.mse_loss(model(x), y) for model in self.models)
                self.accelerator.backward(loss)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.digests.append("".join(map(digest, self.models)))

    def facts(self) -> Facts:
        ours = self.compression is not None
        reducers = self.compression.reducers if ours else []
        return {
            "parameters": {
                f"{index}.{name}": value
                for index, model in enumerate(self.models)
                for name, value in parameters(self.accelerator.unwrap_model(model)).items()
            },
            "digests": self.digests,
            "stats": dict(self.compression.comm_stats()[0]) if ours else None,
            "residuals": {
                f"{index}.{name}": reducer.residuals[name].clone()
                for index, reducer in enumerate(reducers)
                for name in reducer.residuals
            },
            "step": [reducer.step for reducer in reducers],
        }

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.compression is not None:
            self.compression.close()
        forget_accelerators()
