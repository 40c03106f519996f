"""What can only be refused when ranks meet: on every rank, soon, and with the reason."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

from scenarios.catalogue import Facts, rank, scenario
from scenarios.fitting import compressed, fit
from scenarios.models import Regression


def _refused(model: Any, strategy: Any) -> Facts:
    start = time.monotonic()
    try:
        fit(model, strategy)
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
