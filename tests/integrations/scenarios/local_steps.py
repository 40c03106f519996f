"""Local steps through a Trainer: the same as in a loop, resumed, evaluated, inside hosts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lightning_dist import (
    AsyncCheckpoint,
    ElasticLoop,
    ElasticRestart,
    LocalUpdateStrategy,
    local_updates,
)
from lightning_dist.checkpoint.reading import load
from lightning_dist.fabric import LocalUpdateStrategy as FabricStrategy
from lightning_dist.integrations.loop.objects import Objects
from lightning_dist.integrations.torch.local.state import WorkerStates
from scenarios.catalogue import TIMEOUT, Facts, folder, rank, scenario, world_size
from scenarios.fabric_runs import Run
from scenarios.fitting import QUIET, digest, parameters, plain
from scenarios.models import Regression
from scenarios.precision import half

SCHEDULE: dict[str, Any] = {"method": "diloco", "sync_every": 3, "overlap_steps": 1, "mixing": 0.25}


class Watched(L.Callback):
    """Digests of the weights in validations and where a checkpoint may be written; samples."""

    def __init__(self) -> None:
        self.validated: list[str] = []
        self.own: list[str] = []
        self.samples: list[float] = []

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, *_: Any
    ) -> None:
        self.validated.append(digest(module))

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.own.append(digest(module))
        self.samples += batch[0][:, 0].tolist()


class SameData(Regression):
    """The same number of samples on any number of ranks."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Subset(super().train_dataloader().dataset, range(64)), batch_size=8)


def strategy(**settings: Any) -> LocalUpdateStrategy:
    settings = {"min_compress_numel": 0, "timeout": TIMEOUT, **SCHEDULE, **settings}
    return LocalUpdateStrategy(**settings)


def fit(
    of: Any, *, ckpt_path: Any = None, data: type[Regression] = SameData, **arguments: Any
) -> tuple[L.Trainer, Facts]:
    watched = Watched()
    callbacks = [*arguments.pop("callbacks", []), watched]
    given = {**QUIET, "devices": world_size(), "default_root_dir": folder(), "max_epochs": 2}
    trainer = L.Trainer(strategy=of, callbacks=callbacks, **{**given, **arguments})
    model = data(optimizer="adam")
    trainer.fit(model, ckpt_path=ckpt_path)
    facts = {"parameters": parameters(model), "own": watched.own, "validated": watched.validated}
    return trainer, facts


@scenario
def local_steps_as_in_a_loop() -> Facts:
    _, facts = fit(strategy(codec="int8"), gradient_clip_val=0.1)
    torch.manual_seed(1)
    model = Regression(optimizer="adam")
    optimizer = model.configure_optimizers()
    updates = local_updates(model, optimizer, min_compress_numel=0, codec="int8", **SCHEDULE)
    updates.total_steps = 8
    own, norms = list[str](), list[float]()
    for batch in dealt(model):
        optimizer.zero_grad()
        model.loss(batch).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        updates.step()
        own.append(digest(model))
    updates.close()
    loop = {"parameters": parameters(model), "own": own, "norms": norms}
    return {"trainer": facts, "loop": loop}


def dealt(model: Regression) -> Iterator[Any]:
    """Batches of this rank in two epochs of a Trainer."""
    dataset = model.train_dataloader().dataset
    sampler = DistributedSampler(dataset)  # as Lightning makes it
    for epoch in range(2):
        sampler.set_epoch(epoch)
        yield from DataLoader(dataset, batch_size=8, sampler=sampler)


AFTER_DDP: dict[str, Any] = {
    "method": "post_local_sgd",
    "ddp_steps": 2,
    "sync_every": 2,
    "codec": "none",
}


@scenario
def local_steps_after_ddp() -> Facts:
    """Two steps of DDP, of two batches each, and two local ones; beside DDP alone."""
    ours: dict[str, Any] = {"overlap_steps": 0, "mixing": 0.0, **AFTER_DDP}
    found = {}
    for name, of in {"ddp": plain(), "local": strategy(**ours)}.items():
        found[f"trainer {name}"] = fit(of, accumulate_grad_batches=2)[1]["own"][1::2]
    in_fabric = FabricStrategy(min_compress_numel=0, timeout=TIMEOUT, **AFTER_DDP)
    for name, of in {"ddp": "ddp", "local": in_fabric}.items():
        run = Run(of, accumulate=2)
        run.train(8)
        found[f"fabric {name}"] = run.digests
    return found


def saving(name: str, **arguments: Any) -> Facts:
    """A checkpoint of each epoch: NAME0.ckpt and so on."""
    naming = {"filename": name + "{epoch}", "auto_insert_metric_name": False}
    saver = ModelCheckpoint(folder(), save_top_k=-1, enable_version_counter=False, **naming)
    return fit(strategy(codec="int4"), callbacks=[saver], enable_checkpointing=True, **arguments)[1]


@scenario
def local_steps_resume() -> Facts:
    """Saved after 4 steps of 8: in the middle of a window, one step after an exchange began."""
    whole = saving("local_whole")
    path = folder() / "local_whole0.ckpt"
    resumed = saving("local_resumed", ckpt_path=path)
    checkpoint = torch.load(path, weights_only=True)
    anchor = checkpoint["lightning_dist_local_updates"]["shared"]["anchor"]
    # Another strategy takes the anchor's weights.
    other = fit(plain(), ckpt_path=path, max_epochs=1)[1]
    return {
        "whole": whole,
        "resumed": resumed,
        "weights": {name: checkpoint["state_dict"][name] for name in anchor},
        "anchor": anchor,
        "other": other["parameters"],
        "last": torch.load(folder() / "local_whole1.ckpt", weights_only=True)["state_dict"],
    }


ELASTIC: dict[str, Any] = {"codec": "int4", "sync_every": 3, "overlap_steps": 1}


def elastic(name: str, *, extra: Any = (), **arguments: Any) -> tuple[L.Trainer, Facts]:
    restart = ElasticRestart(folder() / name, every_n_train_steps=5, hang_timeout=None)
    arguments = {"callbacks": [restart, *extra], "enable_checkpointing": True, **arguments}
    return fit(strategy(**ELASTIC), **arguments)


class Interrupted(L.Callback):
    """Ends a fit by an error after so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._steps:
            raise InterruptedError


@scenario
def local_steps_elastic() -> Facts:
    """Stopped after 5 steps of 8, inside a window; a third start is for another world."""
    _, whole = elastic("local_elastic_whole")
    with suppress(InterruptedError):
        elastic("local_elastic", extra=[Interrupted(5)])
    dist.barrier()
    if rank() == 0:
        shutil.copytree(folder() / "local_elastic", folder() / "local_elastic_other")
    _, resumed = elastic("local_elastic")
    return {"whole": whole, "resumed": resumed}


@scenario
def local_steps_in_parts() -> Facts:
    """Every rank writes its own worker, after 4 steps of 8."""

    def parted(name: str, **arguments: Any) -> Facts:
        naming = {"filename": "{epoch}", "auto_insert_metric_name": False, "save_top_k": -1}
        saver = AsyncCheckpoint(folder() / name, format="sharded", **naming)
        arguments = {"callbacks": [saver], "enable_checkpointing": True, **arguments}
        with patch.object(dist, "gather_object", side_effect=AssertionError("gathered")):
            return fit(strategy(codec="int4"), **arguments)[1]

    path = folder() / "local_parts" / "0.ckpt"
    whole = parted("local_parts")
    dist.barrier()
    resumed = parted("local_parts_again", ckpt_path=path)
    gather = saving("local_gathered")
    checkpoint = load(str(path))
    single = torch.load(folder() / "local_gathered0.ckpt", weights_only=True)
    key = "lightning_dist_local_updates"
    return {
        "whole": whole,
        "resumed": resumed,
        "gathered": gather["own"],
        "workers": checkpoint[key]["workers"],
        "as_single": single[key]["workers"],
        "optimizer": checkpoint["optimizer_states"],
    }


@scenario
def local_steps_of_workers_with_scalers() -> Facts:
    """Each worker's scale is its own, as it skips steps of its own."""
    model = Regression()
    optimizer = model.configure_optimizers()
    updates = local_updates(model, optimizer, **SCHEDULE)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + rank())) for _ in range(2)]
    saved = [WorkerStates(updates, [optimizer], scaler=scalers[0]).state_dict()]
    dist.broadcast_object_list(saved)
    scalers[1].load_state_dict({**scalers[1].state_dict(), "scale": 1.0})
    WorkerStates(updates, [optimizer], scaler=scalers[1]).load_state_dict(saved[0])
    updates.close()
    return {"scale": scalers[1].get_scale()}


class Overflows(SameData):
    """The loss of rank 0 is infinite in the second step of the first epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hit = rank() == 0 and batch_idx == 1 and self.current_epoch == 0
        return super().training_step(batch, batch_idx) * (float("inf") if hit else 1.0)


@scenario
def local_steps_that_a_scaler_skips() -> Facts:
    """On one worker, under a Trainer, saved after 4 steps of 8, and under Fabric."""
    found: Facts = {}
    naming = {"filename": "local_skips{epoch}", "auto_insert_metric_name": False}
    path = folder() / "local_skips0.ckpt"
    for name, given in {"trainer": None, "resumed": path}.items():
        saver = ModelCheckpoint(folder(), save_top_k=-1, enable_version_counter=False, **naming)
        arguments: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True}
        trainer, facts = fit(
            strategy(codec="int8"), data=Overflows, plugins=half(), ckpt_path=given, **arguments
        )
        scale = trainer.precision_plugin.scaler.get_scale()
        found[name] = {**facts, "attempted": trainer.strategy.updates.attempted, "scale": scale}
        dist.barrier()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ours = FabricStrategy(min_compress_numel=0, timeout=TIMEOUT, codec="int8", **SCHEDULE)
    run = Run(ours, plugins=MixedPrecision("16-mixed", device="cpu", scaler=scaler))
    batches = list(run.batches)
    if rank() == 0:
        batches[1] = batches[1][0], batches[1][1] * float("inf")
    run.batches = iter(batches)
    run.train(8)
    ours.updates.finish()
    facts = {"own": run.digests, "parameters": parameters(run.model)}
    found["fabric"] = {**facts, "attempted": ours.updates.attempted, "scale": scaler.get_scale()}
    return found


def looped(name: str, *, stop: int = 0) -> Facts:
    """An ElasticLoop of 8 steps that saves every third; after ``stop`` of them an error ends it."""
    model = SameData(optimizer="adam")
    optimizer = model.configure_optimizers()
    updates = local_updates(model, optimizer, min_compress_numel=0, codec="int4", **SCHEDULE)
    state = {"updates": updates, "model": model, "optimizer": optimizer}
    settings: dict[str, Any] = {"every_n_train_steps": 3, "every_n_epochs": 0, "seed": 5}
    loader, own = model.train_dataloader(), list[str]()
    with (
        suppress(InterruptedError),
        ElasticLoop(
            folder() / name, loader=loader, state=state, hang_timeout=None, **settings
        ) as loop,
    ):
        start = parameters(model)
        for _ in loop.epochs(2):
            for batch in loop.batches():
                loop.scale_loss(model.loss(batch)).backward()
                optimizer.step()
                optimizer.zero_grad()
                updates.step()
                own.append(digest(model))
                loop.step_done()
                if loop.steps == stop:
                    raise InterruptedError
    try:
        Objects(state, world_size=2).model_to_recover()
    except ValueError as error:
        refused = str(error)
    try:
        sharded = ElasticLoop(folder() / "no", loader=loader, state=state, format="sharded")
        sharded.__enter__()
    except ValueError as error:
        refused += str(error)
    updates.finish()
    updates.close()
    return {
        "own": own,
        "start": start,
        "parameters": parameters(model),
        "refused": refused,
        "steps": loop.steps,
    }


@scenario
def local_steps_in_an_elastic_loop() -> Facts:
    """Stopped after 4 steps of 8, saved after 3, where an exchange has just begun."""
    whole = looped("local_loop_whole")
    looped("local_loop", stop=4)
    dist.barrier()
    if rank() == 0:
        shutil.copytree(folder() / "local_loop", folder() / "local_loop_other")
    dist.barrier()
    return {"whole": whole, "resumed": looped("local_loop")}


class UnequalData(Regression):
    """Batches of 6 on one rank and of 2 on the other, four of each."""

    def train_dataloader(self) -> DataLoader[Any]:
        size = 2 + 4 * rank()
        dataset = super().train_dataloader().dataset
        return DataLoader(Subset(dataset, range(4 * size)), batch_size=size)


@scenario
def local_steps_by_samples() -> Facts:
    """With a Trainer, with Fabric and in a loop."""
    settings: dict[str, Any] = {**SCHEDULE, "weigh_by": "samples", "codec": "int8"}
    found: Facts = {}
    _, found["trainer"] = fit(strategy(**settings), data=UnequalData, use_distributed_sampler=False)
    for name in ("loop", "fabric"):
        model: Any = UnequalData(optimizer="adam")
        data, optimizer = model.train_dataloader(), model.configure_optimizers()
        own: list[str] = []
        count, updates = None, None
        if name == "loop":
            updates = local_updates(model, optimizer, min_compress_numel=0, **settings)
        else:
            ours = FabricStrategy(min_compress_numel=0, timeout=TIMEOUT, **settings)
            fabric = Fabric(accelerator="cpu", devices=2, strategy=ours)
            fabric.launch()
            _, optimizer = fabric.setup(model.net, optimizer)
            try:
                optimizer.step()
            except ValueError as error:
                found["uncounted"] = str(error)
            count, updates = ours.count_samples, ours.updates
        updates.total_steps = 8
        for _ in range(2):
            for x, y in data:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model.net(x), y).backward()
                if count is not None:
                    count(len(x))
                optimizer.step()
                if count is None:
                    updates.step(samples=len(x))
                own.append(digest(model))
        metrics = dict(updates.metrics())
        updates.close()
        found[name] = {"own": own, "parameters": parameters(model), "metrics": metrics}
    return found


@scenario
def local_steps_evaluate() -> Facts:
    """Validation in the middle of windows, with the anchor's weights and with the worker's own."""
    found = {}
    for evaluate in ("anchor", "worker"):
        settings = {"limit_val_batches": 1, "val_check_interval": 2}
        _, found[evaluate] = fit(strategy(codec="int8", evaluate=evaluate), **settings)
    return found


@scenario
def local_steps_validate_another_checkpoint() -> Facts:
    """The same Trainer validates the weights of a file that is not of its fit."""
    saver = ModelCheckpoint(folder(), filename="local_other", enable_version_counter=False)
    fit(plain(), callbacks=[saver], enable_checkpointing=True, max_epochs=1)
    other = torch.load(folder() / "local_other.ckpt", weights_only=True)["state_dict"]
    trainer, _ = fit(strategy(codec="int8"), limit_val_batches=1)
    watched = next(each for each in trainer.callbacks if isinstance(each, Watched))
    watched.validated.clear()
    trainer.validate(trainer.lightning_module, ckpt_path=folder() / "local_other.ckpt")
    trainer.save_checkpoint(folder() / "local_validated.ckpt")
    saved = torch.load(folder() / "local_validated.ckpt", weights_only=True)["state_dict"]
    model = SameData()
    model.load_state_dict(other)
    return {"validated": watched.validated, "wanted": digest(model), "saved": saved, "other": other}


@scenario
def local_steps_with_averaged_weights() -> Facts:
    """Each worker averages its own weights; at the end all have the mean of these."""
    averages = WeightAveraging()
    _, facts = fit(strategy(codec="none", overlap_steps=0, mixing=0.0), callbacks=[averages])
    return {**facts, "average": parameters(averages._average_model.module)}


def fabric(of: Any, *, path: Any = None, skipped: int = 0) -> Run:
    run = Run(of, momentum=0.5)
    if path is not None:
        run.fabric.load(path, run.state())
    for _ in range(skipped):
        next(run.batches)
    return run


@scenario
def local_steps_fabric() -> Facts:
    """Saved after 4 steps, inside a window and an overlap; and the weights of plain DDP loaded."""
    settings = {"min_compress_numel": 0, "timeout": TIMEOUT, "codec": "int4", **SCHEDULE}
    path = folder() / "local_fabric.ckpt"
    whole = fabric(FabricStrategy(**settings))
    whole.train(4)
    whole.fabric.save(path, whole.state())
    anchor = whole.fabric.strategy.updates.anchor_state_dict()
    whole.train(4)
    resumed = fabric(FabricStrategy(**settings), path=path, skipped=4)
    resumed.train(4)
    for run in (whole, resumed):
        run.fabric.strategy.updates.finish()
    plain_run = fabric("ddp")
    plain_run.train(2)
    plain_run.fabric.save(folder() / "plain_fabric.ckpt", plain_run.state())
    other = fabric("compressed_local_sgd", path=folder() / "plain_fabric.ckpt")
    with other.fabric.no_backward_sync(other.model):
        taken = other.fabric.strategy.updates.anchor_state_dict()
    found = {"alone": "", "second": ""}
    for name in found:
        try:
            model = Regression().net
            if name == "alone":
                other.fabric.setup_module(model)
            else:
                other.fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except ValueError as error:
            found[name] = str(error)
    return {
        "whole": whole.digests,
        "resumed": resumed.digests,
        "end": parameters(whole.model),
        "ends": parameters(resumed.model),
        "saved": torch.load(path, weights_only=True)["model"],
        "anchor": anchor,
        "taken": taken,
        "plain": parameters(plain_run.model.module),
        "stats": dict(other.fabric.strategy.comm_stats()[0]),
        **found,
    }


@scenario
def local_steps_by_name() -> Facts:
    logger = CSVLogger(folder(), name=f"local.{rank()}")
    trainer, facts = fit("compressed_local_sgd", logger=logger, max_epochs=4)
    ours = trainer.strategy
    header = Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0] if not rank() else ""
    return {
        **facts,
        "stats": dict(ours.comm_stats()),
        "config": ours.comm_config()["local_updates"],
        "logged": header.split(","),
    }


@scenario
def local_steps_refused() -> Facts:
    found = {}
    model, shards = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    fully_shard(shards, mesh=init_device_mesh("cpu", (world_size(),)))
    for name, make in {
        "start_step": lambda: strategy(start_step=3),
        "replicas": lambda: strategy(replicas="node"),
        "both": lambda: strategy(replicas="host", method="post_local_sgd", ddp_steps=2),
        "compiled": lambda: strategy(compile_kernels=True),
        "rates": lambda: strategy(outer_lr=0.5, outer_optimizer=torch.optim.SGD),
        "one level": lambda: fit(strategy(replicas="host")),
        "no outer step": lambda: fit(strategy(sync_every=100)),
        "zero": lambda: local_updates(model, ZeroRedundancyOptimizer(model.parameters(), SGD)),
        "sharded": lambda: local_updates(shards, SGD(shards.parameters())),
    }.items():
        try:
            make()
        except ValueError as error:
            found[name] = str(error)
        if dist.is_initialized():
            dist.barrier()
    return found
