"""Local steps on three ranks: on two nodes, and where workers join and leave."""

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from local_steps import (
    COMPRESSED,
    KEY,
    Interrupted,
    SameData,
    Watched,
    elastic,
    fit,
    looped,
    strategy,
    trained,
)
from replicas import of_all, require_equal, world_of
from scenarios.fitting import parameters, residuals
from scenarios.world import TIMEOUT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import local_updates
from lightning_dist.fabric import LocalUpdateStrategy as FabricStrategy

pytestmark = pytest.mark.on_ranks(3)


def test_ranks_of_a_host_are_one_worker() -> None:
    """With a Trainer, with Fabric, and in a loop with DDP between the ranks of a node."""
    nodes = [[0, 1], [2]]
    levels: dict[str, Any] = {"hierarchical": "leader", "rank_groups": nodes, "codec": "int8"}
    trainer, watched = fit(strategy(replicas="node", **levels))
    first, second, other = of_all(watched.own)
    assert first == second
    assert first[0] != other[0]
    assert first[-1] == other[-1]
    assert trainer.strategy.comm_stats()["steps"] == 2  # a window of 3, and the end

    model, groups = SameData(), [dist.new_group(each) for each in nodes]
    optimizer = model.configure_optimizers()
    net: Any = DistributedDataParallel(model.net, process_group=groups[dist.get_rank() // 2])
    updates = local_updates(net, optimizer, **COMPRESSED, **levels)
    own = trained(model, optimizer, updates, net=net, after=lambda _: updates.step())
    assert own == watched.own

    model = SameData()
    ours = FabricStrategy(replicas="node", timeout=TIMEOUT, **COMPRESSED, **levels)
    fabric = Fabric(accelerator="cpu", devices=3, strategy=ours)
    fabric.launch()
    net, optimizer = fabric.setup(model.net, model.configure_optimizers())
    assert trained(model, optimizer, ours.updates, net=net) == watched.own


class AfterFive(L.Callback):
    """What a worker has after 5 steps: where a fit is stopped, and where another goes on."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step != 5:
            return
        self.parameters = parameters(module)
        states = trainer.optimizers[0].state.values()
        self.moments = [state["exp_avg"].clone() for state in states]
        updates = trainer.strategy.updates
        self.momenta = [
            each["momentum_buffer"].clone() for each in updates.outer_optimizer.state.values()
        ]
        self.anchor = {name: each.detach().clone() for name, each in updates.anchor.tensors.items()}
        self.attempted = updates.attempted
        self.residuals = residuals(trainer.strategy)


def require_start(
    start: dict[str, Tensor], workers: list[dict[str, Any]], anchor: dict[str, Tensor]
) -> None:
    """Two workers begin with their own weights, and the third, which joins, with the anchor."""
    rank = dist.get_rank()
    require_equal(start, workers[rank]["parameters"] if rank < 2 else anchor)
    first, second, _ = of_all(start["net.0.weight"])
    assert not torch.equal(first, second)


def test_workers_that_join_take_the_anchor(tmp_path: Path) -> None:
    with world_of(2) as is_here:
        if is_here:
            with suppress(InterruptedError):
                elastic(tmp_path, Interrupted(5))
    (path,) = tmp_path.glob("*step=5*")
    saved = torch.load(path, weights_only=True)[KEY]
    start = AfterFive()
    trainer, watched = elastic(tmp_path, start)
    require_start(start.parameters, saved["workers"], saved["shared"]["anchor"])
    state = saved["workers"][dist.get_rank() % 2]["optimizer_states"][0]["state"]
    before = [each["exp_avg"] for each in state.values()]
    assert all(map(torch.equal, start.moments, before))
    assert len({own[-1] for own in of_all(watched.own)}) == 1
    assert trainer.global_step > 5


def test_a_worker_that_leaves_takes_nothing_of_the_others(tmp_path: Path) -> None:
    """Those who stay have their own weights and moments, and all that workers share, exactly.

    Stopped after 5 steps, in a window; the third rank does not come back.
    """
    before, after, seen = AfterFive(), AfterFive(), Watched()
    with suppress(InterruptedError):
        elastic(tmp_path, before, seen, Interrupted(5))
    of_three = of_all(before.residuals)
    with world_of(2) as is_here:
        if is_here:
            _, watched = elastic(tmp_path, after)
            seen.samples += watched.samples
            require_equal(after.parameters, before.parameters)
            require_equal(after.anchor, before.anchor)
            assert all(map(torch.equal, after.moments, before.moments))
            assert all(map(torch.equal, after.momenta, before.momenta))
            assert after.attempted == before.attempted
            for name, residual in after.residuals.items():
                torch.testing.assert_close(residual, sum(each[name] for each in of_three) / 3)
            first, second = of_all(watched.own)
            assert first[-1] == second[-1]
            first, second = of_all(after.moments[0])
            assert not torch.equal(first, second)
    counts = Counter(sample for samples in of_all(seen.samples) for sample in samples)
    assert len(counts) == 64
    assert set(counts.values()) == {2}  # once an epoch


def test_an_elastic_loop_of_two_goes_on_as_three(tmp_path: Path) -> None:
    with world_of(2) as is_here:
        if is_here:
            looped(tmp_path, stop=4)
    (path,) = tmp_path.glob("*.ckpt")
    saved = torch.load(path, weights_only=True)["objects"]
    anchor = saved["updates"]["shared"]["anchor"]
    require_equal(saved["model"], anchor)
    start, own = looped(tmp_path)
    require_start(start, saved["updates"]["workers"], anchor)
    assert len(own) == 5 + 1
    assert len({each[-1] for each in of_all(own)}) == 1
