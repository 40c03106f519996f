"""`delay=1` through a Trainer and Fabric: as in a loop, resumed, refused."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dist import AsyncCheckpoint, LocalUpdateStrategy, compress_ddp
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from scenarios.catalogue import TIMEOUT, Facts, folder, scenario
from scenarios.fabric_runs import Run
from scenarios.fitting import compressed, digest, fit, make_trainer, snapshot
from scenarios.models import Regression


def regression() -> Regression:
    return Regression(optimizer="adam")


@scenario
def delayed_as_in_a_loop() -> Facts:
    facts = fit(regression(), compressed(delay=1))
    model = regression()
    optimizer = model.configure_optimizers()
    ddp = DistributedDataParallel(model.net)
    reducer = compress_ddp(ddp, "int8", min_compress_numel=0, delay=1)
    dataset, found = model.train_dataloader().dataset, []
    sampler = DistributedSampler(dataset)  # as Lightning makes it
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            found.append(digest(model))
    reducer.wait()
    reducer.close()
    return {"trainer": facts, "loop": found}


@scenario
def delayed_resumes() -> Facts:
    """After 4 steps of 8, from a checkpoint of rank 0 and from one in parts."""
    found: dict[str, Any] = {"all": fit(regression(), compressed("int4", delay=1))}
    savers = {
        "whole": ModelCheckpoint(folder() / "delayed", filename="whole"),
        "sharded": AsyncCheckpoint(
            folder() / "delayed_parts", filename="parts", format="sharded", save_last=True
        ),
    }
    for name, saver in savers.items():
        half = {"max_epochs": 1, "callbacks": [saver], "enable_checkpointing": True}
        fit(regression(), compressed("int4", delay=1), **half)
        path = saver.last_model_path or saver.best_model_path
        reads = [AsyncCheckpoint(folder() / "delayed_read", format="sharded")]
        goes_on = {"callbacks": reads, "enable_checkpointing": True, "ckpt_path": path}
        found[name] = fit(regression(), compressed("int4", delay=1), **goes_on)
    trainer = make_trainer(compressed("int4", delay=1), max_epochs=1)
    model = regression()
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 2
    state = copy.deepcopy(trainer.optimizers[0].state_dict())

    class Goes(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            trainer.optimizers[0].load_state_dict(state)  # a fit makes new ones

    trainer.callbacks.append(Goes())
    trainer.fit(model)
    return found | {"again": snapshot(trainer)["digests"]}


@scenario
def delayed_fabric() -> Facts:
    def made() -> Run:
        return Run(FabricStrategy("int8", min_compress_numel=0, delay=1, timeout=TIMEOUT))

    whole, half = made(), made()
    whole.train(6)
    half.train(3)
    path = folder() / "delayed_fabric.ckpt"
    half.fabric.save(path, half.state())
    resumed = made()
    resumed.fabric.load(path, resumed.state())
    for _ in range(3):
        next(resumed.batches)
    resumed.train(3)
    return {"whole": whole.digests[3:], "resumed": resumed.digests}


class TwoOptimizers(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.net[0], self.net[2])]


@scenario
def delayed_refused() -> Facts:
    scaler = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    found = {}
    for name, make in {
        "optimizers": lambda: fit(TwoOptimizers(), compressed(delay=1)),
        "scaler": lambda: fit(regression(), compressed(delay=1), plugins=scaler),
        "local": lambda: LocalUpdateStrategy(delay=1),
    }.items():
        try:
            make()
        except ValueError as error:
            found[name] = str(error)
    return found
