"""Models whose parameters are not all trained in every step, or not by one name only."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from scenarios.catalogue import Facts, rank, scenario
from scenarios.fitting import (
    VARIANTS,
    compressed,
    fit,
    make_trainer,
    plain,
    residuals,
    snapshot,
)
from scenarios.fitting import parameters as copies
from scenarios.models import WIDTH, Regression


class Branches(Regression):
    """Two heads of which a step uses one; remembers parameters and residuals around it."""

    def __init__(self, *, alternate_ranks: bool) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.alternate_ranks = alternate_ranks
        self.steps: list[Facts] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net[self.head](x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        turn = batch_idx + (rank() if self.alternate_ranks else 0)
        self.head = "ab"[turn % 2]
        return self.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = self._state()

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append({"head": self.head, "before": self.before, "after": self._state()})

    def _state(self) -> Facts:
        ours = hasattr(self.trainer.strategy, "comm_stats")
        kept = residuals(self.trainer.strategy) if ours else {}
        return {"parameters": copies(self), "residuals": kept}


def _branches(*, alternate_ranks: bool) -> Facts:
    facts = {}
    for name, strategy in VARIANTS.items():
        model = Branches(alternate_ranks=alternate_ranks)
        facts[name] = fit(model, strategy(find_unused_parameters=True))
        facts[name]["steps"] = model.steps
    return facts


@scenario
def unused_on_all_ranks() -> Facts:
    return _branches(alternate_ranks=False)


@scenario
def unused_on_one_rank() -> Facts:
    return _branches(alternate_ranks=True)


@scenario
def unused_without_the_flag() -> Facts:
    facts: Facts = {}
    for name, strategy in {"ddp": plain(), "int8": compressed()}.items():
        try:
            fit(Branches(alternate_ranks=False), strategy)
        except RuntimeError as error:
            facts[name] = str(error)
    return facts


@scenario
def frozen() -> Facts:
    model = Regression()
    model.net[0].requires_grad_(False)
    before = copies(model)
    return fit(model, compressed()) | {"before": before}


@scenario
def tied() -> Facts:
    facts = {}
    for name, strategy in VARIANTS.items():
        model = Regression(hidden=WIDTH)
        model.net[2].weight = model.net[0].weight
        facts[name] = fit(model, strategy())
        facts[name]["still tied"] = model.net[2].weight is model.net[0].weight
    return facts


@scenario
def batchnorm() -> Facts:
    """DDP takes no SyncBatchNorm on the CPU: that is the proof that it got one."""
    facts: Facts = {}
    for name, strategy in {"ddp": plain, "int8": compressed}.items():
        model = Regression()
        model.net[1] = nn.BatchNorm1d(32)
        try:
            fit(model, strategy(), sync_batchnorm=True)
        except ValueError as error:
            facts[f"{name} sync"] = str(error)
        facts[f"{name} layer"] = type(model.net[1]).__name__
        facts[name] = fit(model, strategy())
    return facts


@scenario
def compiled() -> Facts:
    """The whole module compiled, and a part of it."""
    facts = {"eager": fit(Regression(), compressed())}
    whole = torch.compile(Regression(), backend="aot_eager")
    part = Regression()
    part.net[2] = torch.compile(part.net[2], backend="aot_eager")
    for name, model in {"whole": whole, "part": part}.items():
        trainer: L.Trainer = make_trainer(compressed(), max_epochs=2)
        trainer.fit(model)
        facts[name] = snapshot(trainer)
        facts[name]["checkpoint"] = trainer.strategy._reducer.state_dict()
        facts[name]["state_dict"] = list(trainer.lightning_module.state_dict())
    return facts
