"""Three ranks, two of them on one host: a worker of two ranks and a worker of one."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from scenarios.catalogue import Facts, folder, scenario
from scenarios.fitting import parameters
from scenarios.local_steps import elastic, fit, looped, strategy


@scenario
def local_steps_inside_hosts() -> Facts:
    levels = {"hierarchical": "leader", "rank_groups": [[0, 1], [2]]}
    trainer, facts = fit(strategy(codec="int8", replicas="host", **levels))
    return facts | {"stats": dict(trainer.strategy.comm_stats())}


class AtStart(L.Callback):
    """Parameters and moments before the first step of a fit."""

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {}
        self.moments: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.parameters = parameters(module)
        states = trainer.optimizers[0].state.values()
        self.moments = [state["exp_avg"].clone() for state in states]


@scenario
def local_steps_of_two_go_on_as_three() -> Facts:
    at_start = AtStart()
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
def local_steps_of_two_loop_on_as_three() -> Facts:
    (path,) = (folder() / "local_loop_other").glob("*.ckpt")
    saved = torch.load(path, weights_only=True)["objects"]
    return {
        **looped("local_loop_other"),
        "saved": [worker["parameters"] for worker in saved["updates"]["workers"]],
        "anchor": saved["updates"]["shared"]["anchor"],
        "weights": saved["model"],
    }
