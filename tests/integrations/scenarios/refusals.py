"""What can only be refused when ranks meet: on every rank, soon, and with the reason."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

from lightning_dist import OneBitAdam, after_steps
from scenarios.catalogue import Facts, rank, scenario
from scenarios.fitting import compressed, fit
from scenarios.models import Regression


def _refused(model: Any, strategy: Any, **arguments: Any) -> Facts:
    start = time.monotonic()
    try:
        fit(model, strategy, **arguments)
        message = ""
    except ValueError as error:
        message = str(error)
    return {"message": message, "seconds": time.monotonic() - start}


@scenario
def different_settings() -> Facts:
    """And after that the same ranks train."""
    codec = "int8" if rank() == 0 else "bf16"
    return {
        "codec": _refused(Regression(), compressed(codec)),
        "start_step": _refused(Regression(), compressed(start_step=rank())),
        "afterwards": fit(Regression(), compressed()),
    }


class Frozen(Regression):
    """Its variance is frozen after 8 steps, which is how many a fit takes."""

    freeze_step = 8

    def configure_optimizers(self) -> Any:
        return OneBitAdam(self.parameters(), freeze_step=self.freeze_step)


class Manual(Regression):
    """Lightning does not know how many synchronised steps there are."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()


@scenario
def compression_after_the_end() -> Facts:
    """Of a fit of 8 steps; and what is taken."""
    sooner = Frozen()
    sooner.freeze_step = 7
    return {
        "start_step": _refused(Regression(), compressed(start_step=8)),
        "after_steps": _refused(Regression(), compressed(after_steps(9, "int8"))),
        "freeze_step": _refused(Frozen(), compressed("sign")),
        "last step": _refused(Regression(), compressed(start_step=7)),
        "last but one": _refused(sooner, compressed("sign")),
        "two steps a batch": _refused(Manual(), compressed(start_step=9)),
        "fast_dev_run": _refused(Regression(), compressed(start_step=8), fast_dev_run=2),
    }


@scenario
def nothing_to_train() -> Facts:
    return _refused(Regression().requires_grad_(False), compressed())


class Sparse(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.table(x[:, :1].long() % 10).squeeze(1))


@scenario
def sparse_gradients() -> Facts:
    return _refused(Sparse(), compressed())
