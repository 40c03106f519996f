"""The plain way: automatic optimisation, and DDP's own arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scenarios.catalogue import Facts, scenario
from scenarios.fitting import VARIANTS, compressed, fit, plain
from scenarios.models import Regression

SMALL_BUCKETS = {"bucket_cap_mb": 0.001}


@scenario
def none_equals_ddp() -> Facts:
    return {
        "ddp": fit(Regression(optimizer="momentum"), plain(**SMALL_BUCKETS)),
        "ours": fit(Regression(optimizer="momentum"), compressed("none", **SMALL_BUCKETS)),
    }


@scenario
def codecs_train() -> Facts:
    strategies = {
        "ddp": plain(),
        "fp16": compressed("fp16"),
        "bf16": compressed("bf16"),
        "int8": compressed("int8"),
        "int8 without memory": compressed("int8", error_feedback=False),
    }
    return {
        name: fit(Regression(optimizer="momentum"), strategy, max_epochs=4)
        for name, strategy in strategies.items()
    }


@scenario
def accumulation() -> Facts:
    halves = {"accumulate_grad_batches": 2}
    facts = {name: fit(Regression(), make(), **halves) for name, make in VARIANTS.items()}
    # The last batch of an epoch steps however many there were.
    return facts | {"odd": fit(Regression(), compressed(), limit_train_batches=3, **halves)}


class Clipped(Regression):
    """Remembers the norm of the gradient before and after Lightning clips it."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[float] = []
        self.after: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **named: Any) -> None:
        self.before.append(self._norm())
        super().configure_gradient_clipping(optimizer, *arguments, **named)
        self.after.append(self._norm())

    def _norm(self) -> float:
        gradients: list[Tensor] = [p.grad for p in self.parameters() if p.grad is not None]
        return float(torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in gradients])))


@scenario
def clipping() -> Facts:
    facts = {}
    for name, strategy in VARIANTS.items():
        model = Clipped()
        facts[name] = fit(model, strategy(), gradient_clip_val=0.05)
        facts[name] |= {"before": model.before, "after": model.after}
    return facts


@scenario
def ddp_arguments() -> Facts:
    """Buckets may be cut and stored as one likes: the result has the same bits."""
    variants = {
        "default": {},
        "small buckets": SMALL_BUCKETS,
        "views": {**SMALL_BUCKETS, "gradient_as_bucket_view": True},
        "static graph": {**SMALL_BUCKETS, "static_graph": True},
        "find unused": {**SMALL_BUCKETS, "find_unused_parameters": True},
        "batched copy": {**SMALL_BUCKETS, "batched_grad_copy": True},
    }
    return {name: fit(Regression(), compressed(**given)) for name, given in variants.items()}


@scenario
def start_step() -> Facts:
    return fit(Regression(), compressed(start_step=3))
