"""Local steps of sharded models under a Trainer and Fabric: two nodes of two ranks."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fsdp_models import weights
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from local_model_parallel import (
    SCHEDULE,
    Normed,
    Unequal,
    all_same,
    anchor_of,
    begun_mesh,
    held_by,
    ours,
    state_of,
    watch,
)
from local_steps import dealt
from model_parallel_runs import (
    BATCHES,
    WIDTH,
    FabricRun,
    Memory,
    Module,
    NativeHSDP,
    fitted,
    parallelize,
    same,
    trainer,
    whole,
)
from replicas import of_all, require_equal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from lightning_dist import CommProfiler, LocalUpdateStrategy, local_updates
from lightning_dist.fabric import CompressedModelParallelStrategy as CompressedFabric
from lightning_dist.fabric import LocalUpdateModelParallelStrategy as FabricStrategy
from lightning_dist.sync.networks import DIMENSIONS

pytestmark = [pytest.mark.slow, pytest.mark.on_ranks(4, hosts=2)]


def equal_in_workers(tensors: list[Tensor]) -> bool:
    """Whether the ranks that hold the same shards have the same."""
    found = of_all(tensors)
    return same(found[0], found[2]) and same(found[1], found[3])


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Normed, {"codec": "int8"}),
        (Normed, {"codec": "int4", "offload": True}),
        (Normed, {"method": "streaming", "sync_every": 4, "fragments": 2, "overlap_steps": 1}),
        (Normed, {"codec": "powersgd"}),
        pytest.param(
            Unequal, {"codec": "int8", "weigh_by": "samples"}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["diloco", "offloaded", "streaming", "powersgd", "samples of all ranks of a worker"],
)
def test_a_trainer_does_what_a_loop_does(
    make: Callable[[], Module], settings: dict[str, Any]
) -> None:
    """The same bits after every step."""
    strategy, counts = ours(**settings), make is Unequal
    given = {"gradient_clip_val": 0.5, "use_distributed_sampler": not counts}
    _, _, watched = watch(strategy, make(), **given)
    module = make()
    with patch.object(make, "device_mesh", begun_mesh()):
        module.configure_model()
    optimizer = module.configure_optimizers()
    updates = local_updates(module, optimizer, **{**SCHEDULE, **settings})
    updates.total_steps = 2 * BATCHES
    own, loader = [], module.train_dataloader()
    for step, batch in enumerate([*loader, *loader] if counts else dealt(module)):
        optimizer.zero_grad()
        module.training_step(batch, step).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        updates.step(*([len(batch[0])] if counts else []))
        own.append(held_by(module))
    updates.close()
    assert all_same(watched.own, own)
    assert not equal_in_workers(own[1][:4])
    assert equal_in_workers(weights(module)), "the mean at the end"
    assert strategy.comm_stats()["wire_bytes"] == updates.comm_stats()["wire_bytes"]
    if counts:
        found, expected = strategy.updates.metrics(), updates.metrics()
        assert found["outer/samples"] == expected["outer/samples"]


@pytest.mark.exhaustive
def test_fabric_does_what_a_loop_does_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    settings = {**SCHEDULE, "codec": "int4"}
    run = FabricRun(FabricStrategy(parallelize, **settings))
    own = run.train(8)
    assert not equal_in_workers(own[0])
    net = FabricRun.net()
    parallelize(net, begun_mesh())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    updates, of_loop = local_updates(net, optimizer, **settings), []
    for step in range(8):
        FabricRun.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        updates.step()
        of_loop.append(weights(net))
    assert all_same(own, of_loop)
    for distributed in (True, False):
        path, how = tmp_path / str(distributed), {"save_distributed_checkpoint": distributed}
        first, second = (
            FabricRun(FabricStrategy(parallelize, **settings, **how)) for _ in range(2)
        )
        before = first.train(4)
        first.fabric.save(path, first.state)
        assert same(before[-1], weights(first.model)), "saving changes nothing"
        second.train(1)
        second.fabric.load(path, second.state)
        assert all_same(second.train(4), own[4:])
        plain = FabricRun(CompressedFabric(parallelize))
        plain.fabric.load(path, plain.state)
        assert same([whole(p) for p in plain.model.parameters()], [*anchor_of(path).values()])
    updates.finish()
    run.strategy.updates.finish()
    assert same(weights(net), weights(run.model))
    assert equal_in_workers(weights(net))
    updates.close()


def test_a_local_step_and_its_mean_are_a_step_of_hsdp() -> None:
    """Plain SGD inside and outside, uncompressed."""
    native = NativeHSDP(data_parallel_size=4, tensor_parallel_size=1)
    _, expected = fitted(native, Module(native=True, optimizer=torch.optim.SGD))
    strategy = ours(method="local_sgd", codec="none", sync_every=1, overlap_steps=0, mixing=0.0)
    _, got = fitted(strategy, Module(optimizer=torch.optim.SGD))
    torch.testing.assert_close(weights(expected), weights(got), rtol=1e-5, atol=1e-6)
    assert expected.losses[0] == got.losses[0]
    assert equal_in_workers(weights(got))


def test_mesh_samplers_bytes_logged_metrics_and_a_second_fit() -> None:
    logger, strategy = Memory(), ours(codec="int8", overlap_steps=0)
    found, module, _ = watch(strategy, logger=logger, log_every_n_steps=1)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": dist.get_rank()}
    mesh = dict(zip(module.device_mesh.mesh_dim_names, module.device_mesh.shape, strict=True))
    assert mesh == {"replicate": 2, "data_parallel": 2, "tensor_parallel": 1}
    assert strategy.topology.by_node() == ((0, 1), (2, 3))
    stats = strategy.comm_stats()
    assert stats["steps"] == 3, "two windows, and the end"
    assert 0 < stats["inter_bytes"] == stats["wire_bytes"] < stats["raw_bytes"]
    assert {"outer/cosine", "outer/drift", "comm/total_wire_bytes"} <= logger.metrics.keys()
    assert strategy.comm_config()["local_updates"]["sync_every"] == 3
    before = weights(module)
    found.fit_loop.max_epochs = 3
    found.fit(module)
    assert not same(before, weights(module))
    assert equal_in_workers(weights(module))


def test_strategies_by_name() -> None:
    for name, method in (
        ("diloco", "diloco"),
        ("streaming_diloco", "streaming"),
        ("sparseloco", "sparseloco"),
        ("local_sgd", "local_sgd"),
    ):
        strategy: Any = trainer(f"compressed_model_parallel_{name}").strategy
        assert strategy.comm_stats() == {}
        assert strategy._settings.method == method


@pytest.mark.exhaustive
def test_a_validation_is_of_the_anchor_or_the_workers_own_and_changes_nothing(
    tmp_path: Path,
) -> None:
    """In the middle of windows. A checkpoint that is saved in it has the anchor, and the worker's
    own weights.
    """
    runs, alike, paths, states = {}, {}, {}, {}
    for evaluate in ("anchor", "worker"):
        saves = ModelCheckpoint(tmp_path / evaluate, save_top_k=-1, filename="{step}")
        given = {"limit_val_batches": 1, "val_check_interval": 2, "enable_checkpointing": True}
        _, _, runs[evaluate] = watch(ours(evaluate=evaluate), None, saves, **given)
        alike[evaluate] = [equal_in_workers(each) for each in runs[evaluate].validated]
        assert len(alike[evaluate]) >= 4
        paths[evaluate] = tmp_path / evaluate / "step=4.ckpt"
        states[evaluate] = state_of(paths[evaluate])
    assert all(alike["anchor"])
    assert not all(alike["worker"])
    assert all_same(runs["anchor"].own, runs["worker"].own)
    first, second = (each["workers"][0]["parameters"] for each in states.values())
    require_equal(first, second)
    anchor = states["anchor"]["shared"]["anchor"]
    assert any(not torch.equal(first[name], anchor[name]) for name in first)
    for replicas in (1, 2):  # nothing is exchanged
        alone = Normed()
        validating = trainer(ours(replicate_size=replicas), limit_val_batches=1)
        validating.validate(alone, ckpt_path=paths["worker"], verbose=False)
        require_equal({name: whole(p) for name, p in alone.named_parameters()}, anchor)


def test_a_profile_changes_nothing(tmp_path: Path) -> None:
    _, plain, _ = watch(ours(overlap_steps=0))
    profiler = CommProfiler(dirpath=tmp_path, measure_links=False, print_summary=False)
    _, module, _ = watch(ours(overlap_steps=0), None, profiler)
    assert same(weights(plain), weights(module))
    if dist.get_rank() == 0:
        assert profiler.summary.steps + profiler.summary.warmup_steps == 2 * BATCHES


class Half(Module):
    """Its blocks alone are sharded."""

    def configure_model(self) -> None:
        super().configure_model()
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.head(batch[0])], batch_idx)


class Whole(Module):
    """Sharded over the ranks of a node under a strategy for whole models."""

    def configure_model(self) -> None:
        if self.blocks is None:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=DIMENSIONS[:2])
            self.blocks = parallelize(FabricRun.net(), mesh)


def test_what_cannot_work_is_refused() -> None:
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    cases: list[tuple[str, Callable[[], object]]] = [
        ("got one node of 4 ranks", lambda: fitted(ours(replicate_size=1))),
        ("call it with mesh", lambda: fitted(ours(), Module(native=True))),
        ("CPUOffloadPolicy", lambda: fitted(ours(), Module(**offload))),
        ("got head.weight, head.bias outside of it", lambda: fitted(ours(), Half())),
        ("must have an outer step", lambda: fitted(ours(sync_every=9))),
        ("gives gradients momentum", lambda: fitted(ours(codec="dgc"))),
        (
            "use LocalUpdateModelParallelStrategy with Lightning or Fabric",
            lambda: fitted(LocalUpdateStrategy(**SCHEDULE), Whole()),
        ),
    ]
    for says, case in cases:
        with pytest.raises((ValueError, TypeError), match=re.escape(says)):
            case()


def test_another_order_of_calls_is_refused_under_fabric() -> None:
    net = FabricRun.net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    run = FabricRun(FabricStrategy(parallelize, **SCHEDULE))
    fabric = Fabric(accelerator="cpu", devices=4, strategy=FabricStrategy(parallelize))
    fabric.launch()
    for says, case in (
        ("fabric.setup_optimizers(optimizer)", lambda: fabric.setup(net, optimizer)),
        (
            "call fabric.setup_module(model) first",
            lambda: fabric.setup_optimizers(optimizer),
        ),
        ("got a second one; make another Fabric", lambda: run.fabric.setup_module(net)),
        (
            "got a second one; give all parameters to one",
            lambda: run.fabric.setup_optimizers(optimizer),
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=re.escape(says)):
            case()
