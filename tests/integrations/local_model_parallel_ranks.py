"""What ranks do that take local steps of sharded models under a Trainer and Fabric: started by
`test_local_model_parallel.py`.

torchrun local_model_parallel_ranks.py FOLDER SCENARIO...; leaves facts of every scenario. Ranks are
on two hosts, by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import lightning as L
import model_parallel_ranks
import pytest
import torch
import torch.distributed as dist
from elastic_runs import FailAt, Fault, Numbered, ShardedNet, make_loader
from elastic_runs import fit as elastic_fit
from lightning.fabric import Fabric
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from model_parallel_checkpoints import Reshaped, watch_reads, whole
from model_parallel_ranks import (
    BATCHES,
    WIDTH,
    Memory,
    Module,
    NativeHSDP,
    dist_size,
    fitted,
    parallelize,
    same,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_dist import (
    AsyncCheckpoint,
    CommProfiler,
    CompressedModelParallelStrategy,
    LocalUpdateModelParallelStrategy,
    LocalUpdateStrategy,
    local_updates,
)
from lightning_dist.checkpoint.reading import load as load_checkpoint
from lightning_dist.fabric import CompressedModelParallelStrategy as CompressedFabric
from lightning_dist.fabric import LocalUpdateModelParallelStrategy as FabricStrategy
from lightning_dist.integrations.strategies.mesh import DIMENSIONS

FOLDER = Path(sys.argv[1])
KEY = "lightning_dist_local_updates"
SCHEDULE: dict[str, Any] = {
    "sync_every": 3,
    "overlap_steps": 2,
    "mixing": 0.25,
    "min_compress_numel": 0,
}
"""After an epoch of 4 steps an exchange is under way."""
sgd = partial(torch.optim.SGD)


def ours(**given: Any) -> LocalUpdateModelParallelStrategy:
    return LocalUpdateModelParallelStrategy(**{**SCHEDULE, **given})


class Normed(Module):
    """Each rank has running statistics of its own."""

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        super().configure_model()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.norm(batch[0])], batch_idx)


class Watched(L.Callback):
    """What this rank has where a checkpoint may be written, at the start, and in validations."""

    def __init__(self) -> None:
        self.own: list[list[Tensor]] = []
        self.validated: list[list[Tensor]] = []
        self.start: dict[str, Tensor] = {}
        self.moments: list[Tensor] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start = {n: whole(p) for n, p in pl_module.named_parameters()}
        states = trainer.optimizers[0].state.values()
        self.moments = [whole(each["exp_avg"]) for each in states if "exp_avg" in each]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        buffers = [each.detach().clone() for each in pl_module.buffers()]
        self.own.append([*weights(pl_module), *buffers])

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any
    ) -> None:
        self.validated.append(weights(pl_module))


def watch(
    strategy: Any, module: Module | None = None, *callbacks: Any, **given: Any
) -> tuple[L.Trainer, Module, Watched]:
    watched = Watched()
    callbacks = (*callbacks, watched)
    found, module = fitted(strategy, module or Normed(), callbacks=[*callbacks], **given)
    return found, module, watched


def all_same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return len(a) == len(b) and len(a) > 0 and all(map(same, a, b))


def equal_in_workers(tensors: list[Tensor]) -> bool:
    """Whether the ranks that hold the same shards have the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    equal = True
    for held in tensors:
        first = held.clone()
        dist.broadcast(first, group_src=0, group=mesh["replicate"].get_group())
        equal = equal and torch.equal(first, held)
    return on_all(equal)


def on_all(flag: bool) -> bool:
    flags = [flag] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return all(flags)


def begun(module: Module) -> Any:
    """The module of a loop of one's own, on the mesh that the strategy makes."""
    with patch.object(type(module), "device_mesh", begun_mesh()):
        module.configure_model()
    return module


def begun_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=DIMENSIONS)


def dealt(module: Module) -> Iterator[Any]:
    """Batches of this rank in two epochs of a Trainer."""
    dataset = module.train_dataloader().dataset
    sampler = DistributedSampler(dataset)  # as Lightning makes it
    for epoch in range(2):
        sampler.set_epoch(epoch)
        yield from DataLoader(dataset, batch_size=2, sampler=sampler)


def as_in_a_loop() -> dict[str, bool]:
    """Trainer, Fabric and a loop of one's own: the same bits after every step."""
    cases: dict[str, dict[str, Any]] = {
        "diloco": {"codec": "int8"},
        "offloaded": {"codec": "int4", "offload": True},
        "streaming": {"method": "streaming", "sync_every": 4, "fragments": 2, "overlap_steps": 1},
        "powersgd": {"codec": "powersgd"},
    }
    facts = {}
    for name, settings in cases.items():
        given = {**SCHEDULE, **settings}
        of_trainer, _, watched = watch(ours(**given), gradient_clip_val=0.5)
        module = begun(Normed())
        optimizer = module.configure_optimizers()
        updates = local_updates(module, optimizer, **given)
        updates.total_steps = 2 * BATCHES
        own = list[list[Tensor]]()
        for step, batch in enumerate(dealt(module)):
            optimizer.zero_grad()
            module.training_step(batch, step).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            updates.step()
            own.append([*weights(module), *(each.clone() for each in module.buffers())])
        facts[name] = all_same(watched.own, own)
        facts[f"{name}: mean at the end"] = equal_in_workers(weights(module))
        facts[f"{name}: apart before"] = not equal_in_workers(own[1][:4])
        sent = of_trainer.strategy.comm_stats()
        facts[f"{name}: bytes"] = sent["wire_bytes"] == updates.comm_stats()["wire_bytes"]
        updates.close()
    return facts


def under_fabric() -> dict[str, bool]:
    """Fabric and a loop of one's own, and a run that goes on from a checkpoint."""
    facts = {}
    run = Run()
    own = run.train(8)
    facts["apart before"] = not equal_in_workers(own[0])
    net = Run.net()
    parallelize(net, begun_mesh())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    updates, of_loop = local_updates(net, optimizer, **Run.SETTINGS), list[list[Tensor]]()
    for step in range(8):
        Run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        updates.step()
        of_loop.append(weights(net))
    facts["as in a loop"] = all_same(own, of_loop)
    for distributed in (True, False):
        path = FOLDER / f"fabric-{distributed}"
        first, second = (Run(save_distributed_checkpoint=distributed) for _ in range(2))
        before = first.train(4)
        first.fabric.save(path, first.state)
        facts[f"{distributed}: saving changes nothing"] = same(before[-1], weights(first.model))
        second.train(1)
        second.fabric.load(path, second.state)
        facts[f"{distributed}: resumed"] = all_same(second.train(4), own[4:])
        plain = Run(CompressedFabric(parallelize))
        plain.fabric.load(path, plain.state)
        anchor = torch.load(path / "meta.pt" if distributed else path, weights_only=True)
        anchor = anchor[KEY]["shared"]["anchor"]
        whole = [p.detach().full_tensor() for p in plain.model.parameters()]
        facts[f"{distributed}: weights are the anchor"] = same(whole, [*anchor.values()])
    updates.finish()
    run.strategy.updates.finish()
    facts["mean"] = same(weights(net), weights(run.model)) and equal_in_workers(weights(net))
    updates.close()
    return facts


class Run:
    """A loop under Fabric."""

    SETTINGS: ClassVar[dict[str, Any]] = {**SCHEDULE, "codec": "int4"}

    def __init__(self, strategy: Any = None, **given: Any) -> None:
        self.strategy = strategy or FabricStrategy(parallelize, **self.SETTINGS, **given)
        self.fabric = Fabric(accelerator="cpu", devices=4, strategy=self.strategy)
        self.fabric.launch()
        self.model = self.fabric.setup_module(self.net())
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    @staticmethod
    def net() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))

    @staticmethod
    def loss(net: Any, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(4 * step + dist.get_rank())
        x = torch.randn(3, WIDTH, generator=generator)
        loss: Tensor = (net(x) - x.flip(-1)).square().mean()
        return loss

    def train(self, steps: int) -> list[list[Tensor]]:
        found = []
        for _ in range(steps):
            self.fabric.backward(self.loss(self.model, self.state["step"]))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state["step"] += 1
            found.append(weights(self.model))
        return found


def equal_to_hsdp() -> dict[str, bool]:
    """A local step and its mean are a step of HSDP: plain SGD inside and outside, uncompressed."""
    native = NativeHSDP(data_parallel_size=4, tensor_parallel_size=1)
    _, expected = fitted(native, Module(native=True, optimizer=sgd))
    strategy = ours(method="local_sgd", codec="none", sync_every=1, overlap_steps=0, mixing=0.0)
    _, got = fitted(strategy, Module(optimizer=sgd))
    pairs = list(zip(weights(expected), weights(got), strict=True))
    return {
        "weights": all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs),
        "first losses": expected.losses[0] == got.losses[0],
        "equal": equal_in_workers(weights(got)),
    }


def reports() -> dict[str, Any]:
    """Mesh, samplers, bytes, logged metrics, names and a second fit."""
    logger = Memory()
    strategy = ours(codec="int8", overlap_steps=0)
    found, module, _ = watch(strategy, logger=logger, log_every_n_steps=1)
    stats, logged = strategy.comm_stats(), dict(logger.metrics)
    config, before = strategy.comm_config(), weights(module)
    found.fit_loop.max_epochs = 3
    found.fit(module)
    names = ("diloco", "streaming_diloco", "sparseloco", "local_sgd")
    made: list[Any] = [trainer(f"compressed_model_parallel_{name}").strategy for name in names]
    return {
        "sampler": strategy.distributed_sampler_kwargs,
        "mesh": dict(zip(module.device_mesh.mesh_dim_names, module.device_mesh.shape, strict=True)),
        "topology": strategy.topology.by_host(),
        "stats": {key: stats[key] for key in ("steps", "raw_bytes", "wire_bytes", "inter_bytes")},
        "logged": sorted(logged),
        "local": config["local_updates"]["sync_every"],
        "moved": not same(before, weights(module)),
        "equal": equal_in_workers(weights(module)),
        "by name": [each.comm_stats() == {} and each._schedule.method for each in made],
    }


def evaluated() -> dict[str, bool]:
    """Validation in the middle of windows: of the anchor or the worker's own; it changes nothing.

    A checkpoint that is saved in it has the anchor, and the worker's own weights.
    """
    facts, runs = {}, {}
    for evaluate in ("anchor", "worker"):
        saves = L.pytorch.callbacks.ModelCheckpoint(
            FOLDER / f"evaluated-{evaluate}", save_top_k=-1, filename="{step}"
        )
        given = {"limit_val_batches": 1, "val_check_interval": 2, "enable_checkpointing": True}
        _, _, runs[evaluate] = watch(ours(evaluate=evaluate), None, saves, **given)
        alike = [equal_in_workers(each) for each in runs[evaluate].validated]
        facts[evaluate] = len(alike) >= 4 and (
            all(alike) if evaluate == "anchor" else not all(alike)
        )
    facts["same training"] = all_same(runs["anchor"].own, runs["worker"].own)
    states = [
        torch.load(FOLDER / f"evaluated-{evaluate}" / "step=4.ckpt" / "meta.pt", weights_only=True)
        for evaluate in ("anchor", "worker")
    ]
    first, second = (each[KEY]["workers"][0]["parameters"] for each in states)
    facts["saved"] = all(torch.equal(first[name], second[name]) for name in first)
    anchor = states[0][KEY]["shared"]["anchor"]
    for replicas in (1, 2):  # nothing is exchanged
        alone = Normed()
        path = FOLDER / "evaluated-worker" / "step=4.ckpt"
        validating = trainer(ours(replicate_size=replicas), limit_val_batches=1)
        validating.validate(alone, ckpt_path=path, verbose=False)
        loaded = {name: whole(p) for name, p in alone.named_parameters()}
        facts[f"{replicas}: validated"] = equal(loaded, anchor)
    facts["not the anchor"] = any(not torch.equal(first[name], anchor[name]) for name in first)
    return facts


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))


class Overflows(Normed):
    """The loss of the first worker is infinite in its second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hit = dist.get_rank() == 1 and batch_idx == 1 and self.current_epoch == 0
        return super().training_step(batch, batch_idx) * (float("inf") if hit else 1.0)


HOW = ("distributed", "one file", "async")
"""By Lightning in two formats, or by AsyncCheckpoint."""


def resumed() -> dict[str, Any]:
    """Interrupted while an exchange is under way: the bits of a run that was not."""
    facts: dict[str, Any] = {}
    adam_outside = {"outer_optimizer": partial(torch.optim.AdamW, lr=0.01)}
    cases: dict[str, tuple[Callable[[], Module], dict[str, Any], Sequence[str]]] = {
        "int4": (Normed, {"codec": "int4"}, HOW),
        "powersgd": (Normed, {"codec": "powersgd:rank=2"}, HOW[::2]),
        "outer": (Normed, adam_outside, HOW[2:]),
        "scaler": (Overflows, {"codec": "int8"}, HOW[::2]),
    }
    for name, (make, settings, formats) in cases.items():

        def options(name: str = name) -> dict[str, Any]:
            return {"plugins": [scaled()]} if name == "scaler" else {}

        straight_run, _, straight = watch(ours(**settings), make(), **options())
        for how in formats:
            of, case = {"save_distributed_checkpoint": how != "one file"}, f"{name}, {how}"
            path = saved(FOLDER / f"resumed {name}", make(), how=how, fitting=options(), **settings)
            with pytest.MonkeyPatch.context() as patching:
                read = watch_reads(patching)
                again, _, got = watch(ours(**settings, **of), make(), ckpt_path=path, **options())
            facts[case] = all_same(got.own, straight.own[BATCHES:])
            if case == "int4, async":
                facts["read"] = sum(read)
            if name == "scaler":
                scales = [r.precision_plugin.scaler.get_scale() for r in (straight_run, again)]
                facts[f"{case}: scale"] = scales == [2.0**9 if dist.get_rank() < 2 else 2.0**10] * 2
    return facts


class Stopped(Exception):
    """Ends a fit in the middle of a window."""


class Stop(L.Callback):
    """Saves a checkpoint after so many steps, if it has a path, and ends the fit by an error."""

    def __init__(self, steps: int, path: Path | None = None) -> None:
        self._steps, self._path = steps, path

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._steps:
            if self._path is not None:
                trainer.save_checkpoint(self._path)
            raise Stopped


def saved(
    folder: Path, module: Module | None = None, *, how: str, fitting: Any = None, **settings: Any
) -> Path:
    """A checkpoint in the middle of a window, of two workers of two ranks."""
    path = folder / ("async.ckpt" if how == "async" else how)
    callbacks: list[Any] = [Stop(BATCHES, None if how == "async" else path)]
    given = dict(fitting or {})
    if how == "async":
        saves = AsyncCheckpoint(
            folder, format="sharded", filename="async", every_n_train_steps=BATCHES
        )
        callbacks, given["enable_checkpointing"] = [saves, *callbacks], True
    settings["save_distributed_checkpoint"] = how != "one file"
    with suppress(Stopped):
        watch(ours(**settings), module, *callbacks, **given)
    dist.barrier()
    return path


def elsewhere() -> dict[str, bool]:
    """Four workers, or two, of one rank each go on from two of two ranks."""
    facts, size = {}, dist_size()
    for how in HOW:
        folder = FOLDER / "elsewhere"
        path = folder / ("async.ckpt" if how == "async" else how)
        if size == 4:
            saved(folder, how=how, codec="int4")
        state = state_of(path)
        workers, anchor = state["workers"], state["shared"]["anchor"]
        strategy = ours(codec="int4", replicate_size=size)
        _, module, watched = watch(strategy, ckpt_path=path)
        rank = dist.get_rank()
        expected = workers[rank]["parameters"] if rank < 2 else anchor
        facts[how] = equal(watched.start, expected)
        facts[f"{how}: another's"] = not equal(watched.start, workers[1 - rank % 2]["parameters"])
        moments = workers[rank % 2]["optimizer_states"][0]["state"].values()
        facts[f"{how}: moments"] = same(watched.moments, [each["exp_avg"] for each in moments])
        first = [each.clone() for each in weights(module)]
        for each in first:
            dist.broadcast(each, 0)
        facts[f"{how}: end"] = same(first, weights(module))
    return facts


def state_of(path: Path) -> dict[str, Any]:
    """State of local updates in a checkpoint of any kind."""
    if (path / "meta.pt").is_file():
        path = path / "meta.pt"
    state: dict[str, Any] = load_checkpoint(str(path))
    found: dict[str, Any] = state[KEY]
    return found


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def other_strategies() -> dict[str, bool]:
    """The anchor is the weights for others, whose checkpoints begin a training here."""
    facts = {}
    for how in ("distributed", "one file"):
        path = saved(FOLDER / "others", how=how, codec="int4")
        anchor = state_of(path)["shared"]["anchor"]
        plain = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
        for name, other in (("plain", plain), ("hsdp", CompressedModelParallelStrategy("int8"))):
            _, _, watched = watch(other, ckpt_path=path)
            facts[f"{how}: {name}"] = equal(watched.start, anchor)
            moments = state_of(path)["workers"][0]["optimizer_states"][0]["state"].values()
            first = same(watched.moments, [each["exp_avg"] for each in moments])
            facts[f"{how}: {name}: moments of the first worker"] = first
    theirs = FOLDER / "others" / "theirs"
    with suppress(Stopped):
        watch(CompressedModelParallelStrategy("int8"), None, Stop(BATCHES, theirs))
    strategy = ours()
    begin: list[dict[str, Tensor]] = []
    note = L.pytorch.callbacks.LambdaCallback(
        on_train_start=lambda *_: begin.append(strategy.updates.anchor_state_dict())
    )
    _, _, watched = watch(strategy, None, note, ckpt_path=theirs)
    anchor = {n: each.full_tensor() for n, each in begin[0].items() if n in watched.start}
    facts["theirs"] = equal(anchor, watched.start) and len(anchor) == 8
    return facts


class Plain(Normed):
    """The same module, whole on each rank."""

    def configure_model(self) -> None:
        with (
            patch.object(type(self), "device_mesh", begun_mesh()),
            patch.object(model_parallel_ranks, "fully_shard"),
        ):
            super().configure_model()


def whole_models() -> dict[str, bool]:
    """Workers that were sharded go on as ranks with the whole model, and the other way round."""
    facts, rank = {}, dist.get_rank()
    path = saved(FOLDER / "whole", how="one file", codec="int4")
    state = state_of(path)
    of_whole = {**SCHEDULE, "codec": "int4"}
    seen: list[dict[str, Tensor]] = []

    def note(_: Any, pl_module: L.LightningModule) -> None:
        seen.append({n: p.detach().clone() for n, p in pl_module.named_parameters()})

    def noting(*callbacks: Any) -> list[Any]:
        return [L.pytorch.callbacks.LambdaCallback(on_train_start=note), *callbacks]

    fitted(LocalUpdateStrategy(**of_whole), Plain(), callbacks=noting(), ckpt_path=path)
    expected = state["workers"][rank]["parameters"] if rank < 2 else state["shared"]["anchor"]
    facts["whole"] = equal(seen[0], expected)
    path = FOLDER / "whole" / "of ranks"
    with suppress(Stopped):
        fitted(LocalUpdateStrategy(**of_whole), Plain(), callbacks=[Stop(BATCHES, path)])
    dist.barrier()
    _, _, watched = watch(ours(codec="int4"), ckpt_path=path)
    own = state_of(path)["workers"][rank // 2]
    facts["sharded"] = equal(watched.start, own["parameters"])
    moments = own["optimizer_states"][0]["state"].values()
    facts["moments"] = same(watched.moments, [each["exp_avg"] for each in moments])
    return facts


class Unequal(Module):
    """Batches of one to four samples, by rank."""

    def train_dataloader(self) -> Any:
        size = 1 + dist.get_rank()
        generator = torch.Generator().manual_seed(dist.get_rank())
        data = torch.randn(BATCHES * size, WIDTH, generator=generator)
        return DataLoader(TensorDataset(data), batch_size=size)


def by_samples() -> dict[str, bool]:
    """Samples of all ranks of a worker count, under a Trainer as in a loop; they are saved."""
    settings = {"codec": "int8", "weigh_by": "samples"}
    strategy = ours(**settings)
    _, _, watched = watch(strategy, Unequal(), use_distributed_sampler=False)
    module = begun(Unequal())
    optimizer = module.configure_optimizers()
    updates, own = local_updates(module, optimizer, **{**SCHEDULE, **settings}), []
    updates.total_steps = 2 * BATCHES
    for _ in range(2):
        for step, batch in enumerate(module.train_dataloader()):
            optimizer.zero_grad()
            module.training_step(batch, step).backward()
            optimizer.step()
            updates.step(samples=len(batch[0]))
            own.append(weights(module))
    same_metrics = updates.metrics()["outer/samples"] == strategy.updates.metrics()["outer/samples"]
    updates.close()
    facts = {"as in a loop": all_same(watched.own, own), "metrics": same_metrics}
    path, given = FOLDER / "samples", {"use_distributed_sampler": False}
    with suppress(Stopped):
        watch(ours(**settings), Unequal(), Stop(BATCHES, path), **given)
    _, _, again = watch(ours(**settings), Unequal(), ckpt_path=path, **given)
    facts["resumed"] = all_same(again.own, watched.own[BATCHES:])
    seen: list[float] = []
    strategy = ours(**settings, replicate_size=4)

    def note(*_: Any) -> None:
        seen.append(strategy.updates._gradients.samples.seen)

    callback = L.pytorch.callbacks.LambdaCallback(on_train_start=note)
    watch(strategy, Unequal(), callback, ckpt_path=path, **given)
    own_before = [BATCHES * (1 + 2), BATCHES * (3 + 4), 0, 0][dist.get_rank()]
    facts["of a worker that has fewer ranks"] = seen == [own_before]
    return facts


FAULTS = {
    "on_after_backward": 1,
    "on_train_batch_end": 5,
    "on_validation_batch_end": 6,
    "on_train_end": 9,
}


def elastic_run(name: str, *, fault: str = "") -> tuple[list[Tensor], int]:
    """Weights and outer momenta at the end of a start, and the steps that it took."""
    module, strategy, taken = ShardedNet(noisy=True), ours(codec="int8", sync_every=4), [0]

    def count(*_: Any) -> None:
        taken[0] += 1

    callbacks = [L.pytorch.callbacks.LambdaCallback(on_train_batch_end=count)]
    callbacks += [FailAt(fault, FAULTS[fault])] if fault else []
    with suppress(Fault):
        elastic_fit(
            FOLDER / name,
            *callbacks,
            loader=lambda: make_loader(Numbered(noisy=True), batch_size=4),
            module=module,
            strategy=strategy,
            devices=4,
            elastic={"format": "sharded"},
        )
    dist.barrier()
    assert strategy.updates is not None
    momenta = strategy.updates.outer_optimizer.state_dict()["state"].values()
    return [*weights(module), *(each["momentum_buffer"] for each in momenta)], taken[0]


def restarted() -> dict[str, bool]:
    """Runs that fail at one hook after the other: the bits of one that does not."""
    straight, steps = elastic_run("straight")
    for hook in FAULTS:
        elastic_run("restarted", fault=hook)
    found, rest = elastic_run("restarted")
    return {"equal": same(straight, found) and len(found) == 8, "rest": rest < steps == 9}


def profiled() -> dict[str, Any]:
    """A profile changes nothing."""
    _, plain, _ = watch(ours(overlap_steps=0))
    profiler = CommProfiler(dirpath=FOLDER / "profile", measure_links=False, print_summary=False)
    _, module, _ = watch(ours(overlap_steps=0), None, profiler)
    summary = profiler.summary
    facts: dict[str, Any] = {"same bits": same(weights(plain), weights(module))}
    if summary is not None:
        facts["steps"] = summary.steps + summary.warmup_steps == 2 * BATCHES
    return facts


def refusals() -> dict[str, str]:
    """Messages by what is wrong."""
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    single = AsyncCheckpoint(FOLDER / "single")
    cases: dict[str, Callable[[], object]] = {
        "one host": lambda: fitted(ours(replicate_size=1)),
        "native HSDP": lambda: fitted(ours(), Module(native=True)),
        "offload": lambda: fitted(ours(), Module(**offload)),
        "half": lambda: fitted(ours(), Half()),
        "no outer step": lambda: fitted(ours(sync_every=9)),
        "second momentum": lambda: fitted(ours(codec="dgc")),
        "single": lambda: fitted(ours(), callbacks=[single], enable_checkpointing=True),
        "shapes": lambda: saved_by(Reshaped),
        "jointly": jointly,
        "optimizer first": lambda: optimizer_of(Fabric(strategy=on_fabric(), **ON_CPUS)),
        "second model": lambda: Run().fabric.setup_module(Run.net()),
        "second optimizer": lambda: Run().fabric.setup_optimizers(an_optimizer()),
        "whole": lambda: fitted(LocalUpdateStrategy(**SCHEDULE), Whole()),
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = ""
        except (ValueError, TypeError) as error:
            found[name] = str(error)
    return found


ON_CPUS: dict[str, Any] = {"accelerator": "cpu", "devices": 4}


def on_fabric() -> FabricStrategy:
    return FabricStrategy(parallelize, **Run.SETTINGS)


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.Adam(Run.net().parameters(), lr=0.01)


def optimizer_of(fabric: Fabric) -> object:
    fabric.launch()
    return fabric.setup_optimizers(an_optimizer())


def jointly() -> object:
    fabric, net = Fabric(strategy=on_fabric(), **ON_CPUS), Run.net()
    fabric.launch()
    return fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))


def saved_by(optimizer: Any) -> object:
    module = Module(optimizer=optimizer)
    return watch(ours(), module, Stop(2, FOLDER / "shapes"))


class Half(Module):
    """Its blocks alone are sharded."""

    def configure_model(self) -> None:
        super().configure_model()
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.head(batch[0])], batch_idx)


class Whole(Module):
    """Sharded over the ranks of a host under a strategy for whole models."""

    def configure_model(self) -> None:
        if self.blocks is None:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=DIMENSIONS[:2])
            self.blocks = parallelize(Run.net(), mesh)


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        facts = globals()[name]()
        torch.save({"facts": facts}, FOLDER / f"{name}.{dist_size()}.{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
