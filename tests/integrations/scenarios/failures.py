"""A fit that fails in the model's own code, and the next one with the same trainer and strategy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from scenarios.catalogue import Facts, rank, scenario
from scenarios.fitting import compressed, make_trainer, residuals, snapshot
from scenarios.lifecycle import AtStart
from scenarios.models import Regression

FIRST, LAST = 2, 0  # layers in the order of their gradients; each is a bucket


class Interrupted(Regression):
    """Fails once, in batch 2, when the gradient of ``layer`` has been computed."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.fails = layer, True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.fails:
            self.net[self.layer].weight.register_hook(self._fail)
        return loss

    def _fail(self, _: Tensor) -> None:
        if self.fails:
            self.fails = False
            raise RuntimeError("once")


def _fit_fit(layer: int) -> Facts:
    start, model, error = AtStart(), Interrupted(layer), ""
    strategy = compressed(bucket_cap_mb=0.001)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[start])
    try:
        trainer.fit(model)
    except RuntimeError as caught:
        error = str(caught)
    owed = residuals(strategy)
    trainer.fit(model)
    return {
        "error": error,
        "owed": owed,
        "start": start.residuals,
        "step": start.step,
        "second": snapshot(trainer),
    }


@scenario
def fit_after_a_failure() -> Facts:
    """All ranks fail at the same place, with one bucket on its way."""
    return _fit_fit(LAST)


@scenario
def fit_after_uneven_failures() -> Facts:
    """Rank 0 had sent a bucket that rank 1 never will: their groups are out of step."""
    return _fit_fit(LAST if rank() == 0 else FIRST)
