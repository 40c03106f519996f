"""Models, optimizers and fits that come and go: what keeps replicas equal does not outlive them."""

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from model_parallel_runs import parallelize
from replicas import of_all
from scenarios.fitting import QUIET, make_trainer
from scenarios.models import WIDTH, Regression
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_dist.fabric as of_fabric
from lightning_dist import LocalUpdateStrategy, compress_ddp, local_updates
from lightning_dist.elastic.loop.objects import Objects
from lightning_dist.profiling.session.models import as_ddp
from lightning_dist.sync.base import Environment, sync_of
from lightning_dist.sync.ddp import GradientSync

pytestmark = pytest.mark.on_ranks(2)


def fabric(strategy: Any, **given: Any) -> Fabric:
    made = Fabric(accelerator="cpu", devices=2, strategy=strategy, **given)
    made.launch()
    return made


def sgd(model: nn.Module, **given: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **given)


def step(made: Fabric, model: nn.Module, optimizer: Any) -> None:
    made.backward(model(torch.ones(2, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_models_of_one_fabric_that_come_and_go(tmp_path: Path) -> None:
    """As in a search, or folds: those that are gone are no longer asked."""
    made, path = fabric(of_fabric.CompressedDDPStrategy("none")), of_all(str(tmp_path / "one"))[0]
    for _ in range(3):
        model = nn.Linear(WIDTH, WIDTH)
        model, optimizer = made.setup(model, sgd(model))
        step(made, model, optimizer)
        made.save(path, {"model": model, "optimizer": optimizer})
        del model, optimizer
        gc.collect()


def test_a_second_optimizer_follows_the_first() -> None:
    made = fabric(of_fabric.CompressedDDPStrategy("none", delay=1))
    model = made.setup_module(nn.Linear(WIDTH, WIDTH))
    first = made.setup_optimizers(torch.optim.AdamW(model.parameters()))
    step(made, model, first)
    gone = weakref.ref(first.optimizer)
    second = made.setup_optimizers(sgd(model))  # of the same parameters, and the first is there
    step(made, model, second)
    del first
    made.strategy.reducers[0].wait()  # whose thread compares what optimizers are set to
    gc.collect()
    assert gone() is None, "its moments are freed"


def test_a_model_whose_optimizer_refers_to_it_is_freed() -> None:
    """DDP's C++ side, which the collector does not see, holds the sync."""
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = sgd(model)
    compress_ddp(model, "none")
    sync_of(model, GradientSync).connect([optimizer], Environment())
    optimizer.register_step_post_hook(partial(_after_step, model))
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None]


def _after_step(model: nn.Module, *_: Any) -> None:
    model.train()


def test_momentum_of_parameters_that_ddp_leaves_to_others() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.weight"])
    model = DistributedDataParallel(net)
    reducer = compress_ddp(model, "dgc")
    groups = [{"params": [*net[0].parameters()]}, {"params": [net[1].weight], "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert not sync_of(model).trains(torch.optim.SGD([net[1].weight], lr=0.1))
    reducer.close()


def test_a_loop_saves_the_anchor_of_fabrics_model() -> None:
    strategy = of_fabric.LocalUpdateStrategy(method="diloco", sync_every=4)
    made, net = fabric(strategy), nn.Linear(WIDTH, WIDTH)
    model, optimizer = made.setup(net, sgd(net))
    given = {"model": model, "optimizer": optimizer, "updates": strategy.updates}
    objects, anchor = Objects(given, world_size=2), net.weight.detach().clone()
    step(made, model, optimizer)
    saved = objects.states()["model"]
    (weight,) = (each for name, each in saved.items() if name.endswith("weight"))
    assert torch.equal(weight, anchor)
    assert not torch.equal(weight, net.weight)


class Wrapper(nn.Module):
    """A user's own, whose part has the name that DDP gives to what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(WIDTH, WIDTH)


def test_a_part_called_module_does_not_hide_the_anchor() -> None:
    model = Wrapper()
    optimizer = sgd(model)
    updates = local_updates(model, optimizer, method="diloco", sync_every=4)
    given = {"model": model, "optimizer": optimizer, "updates": updates}
    objects, anchor = Objects(given, world_size=2), model.module.weight.detach().clone()
    model.module(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    assert torch.equal(objects.states()["model"]["module.weight"], anchor)
    assert as_ddp(model) is not None, "a profile finds it too"
    updates.close()


def test_samples_that_nothing_weighs_are_refused() -> None:
    strategy = of_fabric.CompressedDDPStrategy("none")
    made = fabric(strategy)
    made.setup_module(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ValueError, match="leave the call out"):
        strategy.count_samples(8)


def test_local_steps_are_those_of_the_models_own_optimizers() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer, foreign = sgd(model), sgd(other)
    updates = local_updates(model, optimizer, sync_every=2)
    given = {"model": model, "other": other, "one": optimizer, "two": foreign, "u": updates}
    Objects(given, world_size=2)
    assert not foreign._optimizer_step_pre_hooks
    assert len(optimizer._optimizer_step_pre_hooks) == 1, "it was given twice"
    updates.close()


def test_the_report_of_a_fit_stays_after_a_test() -> None:
    strategy = LocalUpdateStrategy(method="local_sgd", sync_every=2, codec="none")
    trainer = L.Trainer(strategy=strategy, max_epochs=1, devices=2, **QUIET)
    module: L.LightningModule = Regression()
    trainer.fit(module)
    stats, config = strategy.comm_stats(), strategy.comm_config()
    trainer.test(module, verbose=False)
    assert stats["steps"] == strategy.comm_stats()["steps"] > 0
    assert strategy.comm_config() == config


def test_a_number_of_steps_that_lightning_cannot_estimate() -> None:
    accumulation = GradientAccumulationScheduler({0: 1, 1: 2})
    trainer = make_trainer("compressed_ddp", max_epochs=2, callbacks=[accumulation])
    trainer.fit(Regression())
    assert trainer.global_step == 4 + 2


@pytest.mark.on_ranks(4, hosts=2)
def test_the_anchor_of_a_sharded_model_is_what_its_optimizer_finds() -> None:
    """Weights may be loaded between the two calls: the optimizer needs the sharded parameters."""
    strategy = of_fabric.LocalUpdateModelParallelStrategy(parallelize, sync_every=2)
    made = fabric(strategy, num_nodes=2)
    model = made.setup_module(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    optimizer = made.setup_optimizers(sgd(model))
    for _ in range(2):
        step(made, model, optimizer)
    assert strategy.updates.attempted == 2
