"""Fabric: the training loop is the user's."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import nn

from scenarios.catalogue import Facts, folder, rank, scenario
from scenarios.fitting import digest, parameters
from scenarios.models import WIDTH, Regression, loader


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


@scenario
def fabric_trains() -> Facts:
    from lightning_dist.fabric import CompressedDDPStrategy

    facts: Facts = {}
    lossless = CompressedDDPStrategy("none")
    for name, strategy in {"ddp": "ddp", "none": lossless, "int8": "compressed_ddp"}.items():
        run = Run(strategy)
        run.train(8)
        facts[name] = run.facts()
    return facts


@scenario
def fabric_accumulates() -> Facts:
    run = Run(accumulate=2)
    run.train(8)
    return run.facts()


@scenario
def fabric_compiled() -> Facts:
    facts = {}
    for name, compiled in {"eager": False, "compiled": True}.items():
        run = Run(compiled=compiled)
        run.train(8)
        facts[name] = run.facts()
    return facts


@scenario
def fabric_scaler() -> Facts:
    facts = {}
    for name, growth_interval in {"constant": 1000, "growing": 1}.items():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=growth_interval)
        run = Run(plugins=MixedPrecision("16-mixed", device="cpu", scaler=scaler))
        run.train(8)
        facts[name] = run.facts() | {"scale": scaler.get_scale()}
    return facts


@scenario
def fabric_resumes() -> Facts:
    whole = Run()
    whole.train(4)
    whole.fabric.save(folder() / "fabric.ckpt", whole.state())
    half = whole.facts()
    whole.train(4)
    resumed = Run()
    for _ in range(4):
        next(resumed.batches)
    rest = resumed.fabric.load(folder() / "fabric.ckpt", resumed.state())
    resumed.train(4)
    keys = sorted(torch.load(folder() / "fabric.ckpt", weights_only=True))
    facts = {"whole": whole.facts(), "resumed": resumed.facts(), "half": half}
    return {**facts, "rest": sorted(rest), "keys": keys}


@scenario
def fabric_other_files() -> Facts:
    """Residuals after each kind of load: of plain DDP's checkpoint, and of what is not for us."""
    plain, ours, teacher = Run("ddp"), Run(), nn.Linear(2, 2)
    for run in (plain, ours):
        run.train(2)
    plain.fabric.save(folder() / "plain_fabric.ckpt", plain.state())

    if rank() == 0:
        torch.save(teacher.state_dict(), folder() / "teacher.pt")
    ours.fabric.barrier()
    facts = {"before": ours.facts()}
    ours.fabric.load(folder() / "plain_fabric.ckpt")  # returns what is in it
    facts["looked into"] = ours.facts()
    ours.fabric.load_raw(folder() / "teacher.pt", teacher)
    facts["other module"] = ours.facts()
    ours.fabric.load(folder() / "plain_fabric.ckpt", ours.state())
    facts["restored"] = ours.facts() | {"step": ours.fabric.strategy.reducers[0].step}
    return facts


@scenario
def fabric_two_modules() -> Facts:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="compressed_ddp")
    fabric.launch()
    modules = [fabric.setup_module(nn.Linear(WIDTH, 256, bias=False)) for _ in range(2)]
    fabric.backward(sum(module(torch.ones(1, WIDTH)).square().mean() for module in modules))
    return {"wire_bytes": [stats["wire_bytes"] for stats in fabric.strategy.comm_stats()]}
