"""bfloat16 and float16, the latter with a real GradScaler."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from scenarios.catalogue import Facts, rank, scenario
from scenarios.fitting import VARIANTS, compressed, fit, parameters, residuals
from scenarios.models import Regression

OVERFLOW_AT, OVERFLOW_ON = 3, 1  # batch, rank


@scenario
def precisions() -> Facts:
    facts = {}
    for precision in ("bf16-mixed", "bf16-true", "16-true", "64-true"):
        for name, strategy in VARIANTS.items():
            facts[f"{precision} {name}"] = fit(Regression(), strategy(), precision=precision)
    return facts


class Overflowing(Regression):
    """One rank's loss is infinite at one batch. Remembers scale and state after every batch."""

    def __init__(self, *, overflow: bool = True) -> None:
        super().__init__(batches=8)
        self.overflow = overflow
        self.scales: list[float] = []
        self.states: list[Facts] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        hit = self.overflow and batch_idx == OVERFLOW_AT and rank() == OVERFLOW_ON
        return loss * float("inf") if hit else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        kept = residuals(self.trainer.strategy)
        self.states.append({"parameters": parameters(self), "residuals": kept})


def half(**scaler: Any) -> list[MixedPrecision]:
    """16-mixed on the CPU, which ``precision="16-mixed"`` would turn into bf16-mixed."""
    real = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, **scaler})
    return [MixedPrecision("16-mixed", device="cpu", scaler=real)]


@scenario
def overflow() -> Facts:
    facts = {}
    for name, codec in {"int8": "int8", "bf16 with memory": "bf16"}.items():
        model = Overflowing()
        strategy = compressed(codec, error_feedback=True)
        facts[name] = fit(model, strategy, plugins=half(), max_epochs=1)
        facts[name] |= {"scales": model.scales, "states": model.states}
    return facts


@scenario
def growing_scale() -> Facts:
    """A residual is kept unscaled, so a scale that changes, by powers of 2, changes nothing."""
    facts = {}
    for name, growth_interval in {"constant": 1000, "growing": 1}.items():
        model = Overflowing(overflow=False)
        plugins = half(growth_interval=growth_interval)
        facts[name] = fit(model, compressed(), plugins=plugins, max_epochs=1)
        facts[name] |= {"scales": model.scales}
    return facts
