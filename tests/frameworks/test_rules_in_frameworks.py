"""Rules of every moment are checked in every framework, with what it knows of the training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import accelerate
import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision
from model_parallel_runs import Module, parallelize
from scenarios.accelerating import forget_accelerators
from scenarios.fitting import QUIET
from scenarios.models import WIDTH, Regression
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_dist
import lightning_dist.accelerate as of_accelerate
import lightning_dist.fabric as of_fabric
from lightning_dist.elastic.loop.objects import Objects
from lightning_dist.settings.exchange import DDP, FSDP2, LOCAL, LOCAL_SHARDS
from lightning_dist.sync import rules
from lightning_dist.sync.rules import Case, Rule

KINDS = (DDP, FSDP2, LOCAL, LOCAL_SHARDS)
LOCAL_STEPS = {"method": "local_sgd", "sync_every": 1, "codec": "none"}
Cases = dict[str, Case]
Train = Callable[[], torch.amp.GradScaler | None]


@contextmanager
def watched() -> Iterator[Cases]:
    """The last case of each moment for which rules are checked in the block."""
    seen: Cases = {}
    moments = ("module", "model", "optimizers", "clipping", "steps")

    def watch(moment: Any) -> Rule:
        return Rule(f"watch {moment}", moment, KINDS, lambda case: seen.update({moment: case}))

    with mock.patch.object(rules, "RULES", [*rules.RULES, *map(watch, moments)]):
        yield seen


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def step(net: nn.Module, optimizer: Any, *, backward: Any = None) -> None:
    loss = net(torch.ones(2, WIDTH)).square().mean()
    loss.backward() if backward is None else backward(loss)
    optimizer.step()


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=4.0)


def plain_ddp() -> Any:
    net, scales = DistributedDataParallel(model()), scaler()
    reducer = lightning_dist.compress_ddp(net, "none", grad_scaler=scales)
    step(net, sgd(net))
    reducer.close()
    return scales


def plain_local() -> Any:
    net = model()
    optimizer = sgd(net)
    updates = lightning_dist.local_updates(net, optimizer, **LOCAL_STEPS)
    step(net, optimizer)
    updates.close()


def loop_of_ones_own() -> Any:
    net, scales = model(), scaler()
    optimizer = sgd(net)
    updates = lightning_dist.local_updates(net, optimizer, **LOCAL_STEPS)
    given = {"model": net, "optimizer": optimizer, "updates": updates, "scaler": scales}
    Objects(given, world_size=dist.get_world_size())
    updates.close()
    return scales


def fit(module: L.LightningModule, strategy: Any, **given: Any) -> Any:
    scales = scaler()
    plugins = [MixedPrecision("16-mixed", device="cpu", scaler=scales)]
    trainer = L.Trainer(strategy=strategy, plugins=plugins, max_epochs=1, **{**QUIET, **given})
    trainer.fit(module)
    return scales


def trainer_ddp() -> Any:
    strategy = lightning_dist.CompressedDDPStrategy("none")
    return fit(Regression(), strategy, devices=2, gradient_clip_val=1.0)


def trainer_local() -> Any:
    return fit(Regression(), lightning_dist.LocalUpdateStrategy(**LOCAL_STEPS), devices=2)


def fabric(strategy: Any, scales: Any = None) -> Fabric:
    plugins = scales and [FabricMixedPrecision("16-mixed", device="cpu", scaler=scales)]
    made = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugins)
    made.launch()
    return made


def fabric_ddp() -> Any:
    scales, net = scaler(), model()
    made = fabric(of_fabric.CompressedDDPStrategy("none"), scales)
    net, optimizer = made.setup(net, sgd(net))
    made.backward(net(torch.ones(2, WIDTH)).square().mean())
    made.clip_gradients(net, optimizer, max_norm=1.0)
    optimizer.step()
    return scales


def fabric_local() -> Any:
    scales, net = scaler(), model()
    made = fabric(of_fabric.LocalUpdateStrategy(**LOCAL_STEPS), scales)
    net, optimizer = made.setup(net, sgd(net))
    step(net, optimizer, backward=made.backward)
    return scales


def accelerated(make: Any, attach: Callable[[Any], object], *, clips: bool = False) -> Any:
    forget_accelerators()
    accelerator, scales = make(cpu=True), scaler()
    accelerator.scaler = scales
    attach(accelerator)
    net = model()
    net, optimizer = accelerator.prepare(net, sgd(net))
    accelerator.backward(net(torch.ones(2, WIDTH)).square().mean())
    if clips:
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    accelerator.end_training()
    forget_accelerators()
    return scales


def accelerate_ddp() -> Any:
    handlers = [of_accelerate.CompressedDDPPlugin("none")]
    make = partial(of_accelerate.Accelerator, kwargs_handlers=handlers)
    return accelerated(make, lambda accelerator: None, clips=True)


def accelerate_local() -> Any:
    plugin = of_accelerate.LocalUpdatesPlugin(**LOCAL_STEPS)
    return accelerated(accelerate.Accelerator, plugin.attach)


WHOLE = {"module", "model", "optimizers"}
OF_WHOLE: dict[str, tuple[Train, set[str]]] = {
    "compress_ddp": (plain_ddp, WHOLE),
    "CompressedDDPStrategy": (trainer_ddp, {*WHOLE, "clipping", "steps"}),
    "Fabric's": (fabric_ddp, {*WHOLE, "clipping"}),
    "CompressedDDPPlugin": (accelerate_ddp, {*WHOLE, "clipping"}),
    "local_updates": (plain_local, WHOLE),
    "ElasticLoop": (loop_of_ones_own, WHOLE),
    "LocalUpdateStrategy": (trainer_local, {*WHOLE, "steps"}),
    "Fabric's LocalUpdateStrategy": (fabric_local, WHOLE),
    "LocalUpdatesPlugin": (accelerate_local, WHOLE),
}


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("name", OF_WHOLE)
def test_models_that_are_whole(name: str) -> None:
    train, moments = OF_WHOLE[name]
    with watched() as cases:
        scales = train()
    require(cases, moments, scales)
    if "local" in name.lower() or name == "ElasticLoop":
        assert name == "local_updates" or not cases["optimizers"].environment.saves_shards


def require(cases: Cases, moments: set[str], scales: torch.amp.GradScaler | None) -> None:
    assert cases.keys() == moments
    found = {name: case.environment.grad_scaler for name, case in cases.items()}
    assert scales is None or scales in (found["model"], found["optimizers"])
    for moment in moments & {"optimizers", "clipping"}:
        assert cases[moment].optimizers, moment
    assert "steps" not in moments or cases["steps"].steps > 0
    assert cases["optimizers"].parameters is not None


def trainer_shards(strategy: Any) -> Train:
    return lambda: fit(Module(), strategy(), devices=2, num_nodes=2) and None


def fabric_shards(strategy: Any) -> Train:
    def train() -> None:
        made = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy=strategy(parallelize))
        made.launch()
        net = made.setup_module(nn.Sequential(nn.Linear(18, 18), nn.Linear(18, 18)))
        optimizer = made.setup_optimizers(sgd(net))
        made.backward(net(torch.ones(2, 18)).square().mean())
        optimizer.step()

    return train


def local_shards(kind: Any) -> Any:
    return lambda *args: kind(*args, **LOCAL_STEPS)


SHARDED = {"model", "optimizers"}
OF_SHARDS: dict[str, tuple[Train, set[str]]] = {
    "CompressedModelParallelStrategy": (
        trainer_shards(lightning_dist.CompressedModelParallelStrategy),
        {*SHARDED, "steps"},
    ),
    "LocalUpdateModelParallelStrategy": (
        trainer_shards(local_shards(lightning_dist.LocalUpdateModelParallelStrategy)),
        {*WHOLE, "steps"},
    ),
    "Fabric's CompressedModelParallelStrategy": (
        fabric_shards(of_fabric.CompressedModelParallelStrategy),
        SHARDED,
    ),
    "Fabric's LocalUpdateModelParallelStrategy": (
        fabric_shards(local_shards(of_fabric.LocalUpdateModelParallelStrategy)),
        WHOLE,
    ),
}


@pytest.mark.on_ranks(4, hosts=2)
@pytest.mark.parametrize("name", OF_SHARDS)
def test_models_that_are_sharded(name: str) -> None:
    train, moments = OF_SHARDS[name]
    with watched() as cases:
        train()
    require(cases, moments, None)
    assert cases["model"].environment.mesh is not None
