"""Three ranks, two of them on one host: a worker of two ranks and a worker of one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import local_updates
from lightning_dist.fabric import LocalUpdateStrategy as FabricStrategy
from scenarios.catalogue import TIMEOUT, Facts, first_ranks, folder, rank, scenario
from scenarios.fitting import digest, parameters, residuals
from scenarios.local_steps import (
    SCHEDULE,
    Interrupted,
    SameData,
    Watched,
    dealt,
    elastic,
    fit,
    looped,
    strategy,
)

LEVELS: dict[str, Any] = {"hierarchical": "leader", "rank_groups": [[0, 1], [2]], "codec": "int8"}


@scenario
def local_steps_inside_hosts() -> Facts:
    """With a Trainer, with Fabric, and in a loop with DDP between the ranks of a host."""
    trainer, facts = fit(strategy(replicas="host", **LEVELS))
    found: Facts = {**facts, "stats": dict(trainer.strategy.comm_stats())}
    hosts = [dist.new_group(each) for each in LEVELS["rank_groups"]]
    settings: dict[str, Any] = {**SCHEDULE, **LEVELS, "min_compress_numel": 0}
    for name in ("loop", "fabric"):
        model: Any = SameData(optimizer="adam")
        optimizer = model.configure_optimizers()
        if name == "loop":
            net = DistributedDataParallel(model.net, process_group=hosts[rank() // 2])
            updates = local_updates(net, optimizer, **settings)
        else:
            ours = FabricStrategy(replicas="host", timeout=TIMEOUT, **settings)
            fabric = Fabric(accelerator="cpu", devices=3, strategy=ours)
            fabric.launch()
            net, optimizer = fabric.setup(model.net, optimizer)
            updates = ours.updates
        updates.total_steps, own = 6, list[str]()
        for x, y in dealt(model):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            if name == "loop":
                updates.step()
            own.append(digest(model))
        updates.close()
        found[name] = {"own": own, "parameters": parameters(model)}
    return found


class AfterFive(L.Callback):
    """What a worker has after 5 steps: where a fit is stopped, and where another goes on."""

    KEPT = ("parameters", "moments", "shared", "residuals")

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {}
        self.moments: list[Any] = []
        self.shared: dict[str, Any] = {}
        self.residuals: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step != 5:
            return
        self.parameters = parameters(module)
        states = trainer.optimizers[0].state.values()
        self.moments = [state["exp_avg"].clone() for state in states]
        updates = trainer.strategy.updates
        momenta = {
            f"momentum {index}": each["momentum_buffer"].clone()
            for index, each in enumerate(updates.outer_optimizer.state.values())
        }
        anchor = {name: each.detach().clone() for name, each in updates._anchors().items()}
        self.shared = {**anchor, **momenta, "attempted": torch.tensor(updates.attempted)}
        self.residuals = residuals(trainer.strategy)


@scenario
def local_steps_of_two_go_on_as_three() -> Facts:
    at_start = AfterFive()
    (path,) = (folder() / "local_elastic_other").glob("*step=5*")
    saved = torch.load(path, weights_only=True)["lightning_dist_local_updates"]
    trainer, facts = elastic("local_elastic_other", extra=[at_start])
    return {
        "parameters": facts["parameters"],
        "start": at_start.parameters,
        "moments": at_start.moments,
        "saved": [worker["parameters"] for worker in saved["workers"]],
        "saved_moments": [
            [state["exp_avg"] for state in worker["optimizer_states"][0]["state"].values()]
            for worker in saved["workers"]
        ],
        "anchor": saved["shared"]["anchor"],
        "steps": trainer.global_step,
    }


@scenario
def local_steps_of_three_go_on_as_two() -> Facts:
    """Stopped after 5 steps, in a window; the third rank does not come back."""
    found: Facts = {}

    def train(name: str, *extra: L.Callback) -> None:
        state, watched = AfterFive(), Watched()
        try:
            _, facts = elastic("local_three", extra=[state, watched, *extra])
            found["end"] = facts["parameters"]
        finally:
            taken = {key: getattr(state, key) for key in AfterFive.KEPT}
            found[name] = {**taken, "samples": watched.samples}

    with suppress(InterruptedError):
        train("before", Interrupted(5))
    with first_ranks(2) as is_here:
        if is_here:
            train("after")
    return found


@scenario
def local_steps_of_two_loop_on_as_three() -> Facts:
    (path,) = (folder() / "local_loop_other").glob("*.ckpt")
    saved = torch.load(path, weights_only=True)["objects"]
    return {
        **looped("local_loop_other"),
        "saved": [worker["parameters"] for worker in saved["updates"]["workers"]],
        "anchor": saved["updates"]["shared"]["anchor"],
        "weights": saved["model"],
    }
