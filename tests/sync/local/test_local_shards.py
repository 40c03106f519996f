"""Local steps between nodes that hold a model in shards (FSDP2), on two nodes of two processes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    WIDTH,
    Net,
    bytes_held,
    local,
    mesh_of,
    replicas_are_equal,
    same_in_replicas,
    sharded,
    weights,
)
from lightning_utilities.core import rank_zero
from local_worlds import Worker, adam, sgd
from replicas import of_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from lightning_dist import local_updates
from lightning_dist.sync.base import Environment

pytestmark = [pytest.mark.slow, pytest.mark.on_ranks(4)]
ALL: dict[str, Any] = {"min_compress_numel": 0}
STREAMING = {
    "method": "streaming",
    "sync_every": 16,
    "fragments": 8,  # an exchange every other step
    "overlap_steps": 1,
    "codec": "int4",
    **ALL,
}
"""A fragment of the head of one row, of which one of the shards has nothing."""


def batches(dtype: torch.dtype, *, seed: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    while True:
        yield torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


@contextmanager
def training(
    net: Any,
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adam,
    **settings: Any,
) -> Iterator[Worker]:
    """Local steps of this rank's worker."""
    optimizer = make(net.parameters())
    updates = local_updates(net, optimizer, **settings)
    dtype = next(net.parameters()).dtype
    try:
        yield Worker(dist.get_rank(), net, optimizer, updates, batches(dtype))
    finally:
        updates.close()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_local_step_and_its_mean_are_a_step_of_hsdp(dtype: torch.dtype, tolerance: float) -> None:
    """Plain SGD inside and outside, uncompressed."""
    mesh = mesh_of(2, 2)
    native = sharded(mesh, dtype=dtype, frozen=True)
    optimizer, data = sgd(native.parameters()), batches(dtype)
    for _ in range(5):
        optimizer.zero_grad()
        native(next(data)).square().mean().backward()
        optimizer.step()
    net = sharded(mesh["shard"], dtype=dtype, frozen=True, unequal=True)
    with torch.no_grad():  # the first worker begins as HSDP does, the others elsewhere
        begin = weights(sharded(mesh["shard"], dtype=dtype, frozen=True))
        for parameter, held in zip(net.parameters(), begin, strict=True):
            local(parameter).copy_(held if mesh["replicate"].get_local_rank() == 0 else -held)
    with training(net, sgd, method="local_sgd", sync_every=1, codec="none") as ours:
        ours.train(5)
        torch.testing.assert_close(weights(native), weights(net), rtol=tolerance, atol=tolerance)
        assert replicas_are_equal(net, mesh)


@pytest.mark.parametrize(
    "settings",
    [
        {"sync_every": 2, "codec": "int8", **ALL},
        {"sync_every": 2, "codec": "powersgd", **ALL},
        {"method": "sparseloco", "sync_every": 2, **ALL},
        STREAMING,
    ],
    ids=["int8", "powersgd", "sparseloco", "streaming"],
)
def test_anchors_are_equal_at_every_step_and_workers_differ_between(
    settings: dict[str, Any],
) -> None:
    """Those of the same shard in all workers, bit for bit."""
    mesh = mesh_of(2, 2)
    net = sharded(mesh["shard"], unequal=True)
    with training(net, **settings) as ours:
        apart, moved, begin = False, False, ours.anchors()
        for _ in range(9):
            ours.train(1)
            assert same_in_replicas(ours.anchors(), mesh)
            own = torch.cat([each.reshape(-1) for each in weights(net)])
            apart |= not same_in_replicas([own], mesh)
            moved |= not all(map(torch.equal, begin, ours.anchors()))
        assert moved
        assert apart or mesh["replicate"].get_local_rank() == 0, "compared with the first"
        sent = ours.updates.comm_stats()
        assert 0 < sent["wire_bytes"] < 0.5 * sent["raw_bytes"]


def test_layers_that_are_unfrozen_and_frozen_again() -> None:
    """They are sharded; one that is not is refused before it is stepped."""
    mesh = mesh_of(2, 2)
    net = sharded(mesh["shard"])
    first, head = net.blocks[0], net.head
    first.requires_grad_(False)

    def of_all(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    with training(net, of_all, sync_every=2, codec="int8", **ALL) as ours:
        ours.train(2)
        first.requires_grad_(True)
        ours.train(4)
        assert replicas_are_equal(net, mesh)
        assert any(name.startswith("blocks.0.") for name in ours.updates.trained)
        head.requires_grad_(False)
        ours.train(4)
        held, sent = weights(head), ours.updates.state_dict()
        assert sent is None or not any(name.startswith("head.") for name in sent["anchor"])
        ours.train(2)
        assert replicas_are_equal(net, mesh)
        assert all(map(torch.equal, held, weights(head)))
    partly = half_sharded(mesh["shard"])
    outside = [each for each in partly.parameters() if not hasattr(each, "to_local")]
    for each in outside:
        each.requires_grad_(False)
    with training(partly, of_all, sync_every=2, **ALL) as ours:
        ours.train(1)
        for each in outside:
            each.requires_grad_(True)
        with pytest.raises(ValueError, match="as nothing averages the others"):
            ours.train(1)


def test_one_line_has_what_is_in_force() -> None:
    net = sharded(mesh_of(2, 2)["shard"])
    with patch.object(rank_zero.log, "info") as said, training(net, **STREAMING):
        pass
    line = (
        "[lightning_dist] local updates: streaming, an outer step every 16 steps in 8 fragments "
        "with overlap_steps=1; codec int4, 2 workers x 2 ranks, "
        "each exchanges its shard, 1 node x 4 ranks, world size 4"
    )
    assert [each.args for each in said.mock_calls] == [(line,)] * (dist.get_rank() == 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"sync_every": 4, "codec": "int8", **ALL},
        {"sync_every": 5, "overlap_steps": 3, "codec": "int4", **ALL},
        {"sync_every": 3, "outer_optimizer": partial(torch.optim.AdamW, lr=0.01)},
        STREAMING,
    ],
    ids=["window", "exchange", "Adam outside", "streaming"],
)
def test_a_run_that_is_interrupted_goes_on_with_the_same_bits(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """In a window, or in an exchange."""
    shard, path = mesh_of(2, 2)["shard"], tmp_path / f"{dist.get_rank()}.pt"
    net = sharded(shard)
    with training(net, **settings) as ours:
        ours.train(6)
        state, *_ = of_all(ours.updates.state_dict())
        torch.save({"model": net.state_dict(), "optimizer": ours.optimizer.state_dict()}, path)
        ours.data = batches(torch.float32, seed=1)
        ours.train(7)
        straight = [*weights(net), *ours.anchors()]
    net = sharded(shard, unequal=True)
    with training(net, **settings) as ours:
        own = torch.load(path, weights_only=True)
        net.load_state_dict(own["model"])
        ours.optimizer.load_state_dict(own["optimizer"])
        ours.updates.load_state_dict(state)
        ours.data = batches(torch.float32, seed=1)
        ours.train(7)
        assert all(map(torch.equal, straight, [*weights(net), *ours.anchors()]))


def test_workers_with_whole_models_start_from_the_same_anchor_and_momentum() -> None:
    """The state has whole parameters."""
    with training(sharded(mesh_of(2, 2)["shard"]), sync_every=2, codec="none") as ours:
        ours.train(5)
        state, *_ = of_all(ours.updates.state_dict())
    plain = Net()
    with training(plain, sync_every=2, codec="none") as ours:
        ours.updates.load_state_dict(state)
        ours.updates.start_from_anchor()
        parameters = dict(plain.named_parameters())
        assert len(state["anchor"]) == 18
        for name, anchor in state["anchor"].items():
            assert torch.equal(parameters[name].detach(), anchor), name
        ours.train(2)
        held = ours.updates.outer_optimizer.state_dict()["state"]
        assert len(held) == 18
        assert all(each["momentum_buffer"].dim() for each in held.values())


def test_a_worker_is_left_out_with_all_of_its_shards_if_one_is_not_finite() -> None:
    mesh = mesh_of(2, 2)
    net = sharded(mesh["shard"])
    with training(net, method="local_sgd", sync_every=2, codec="none") as ours:
        ours.train(1)
        ours.learn()
        of_second = weights(net)
        for each in of_second:
            dist.broadcast(each, group_src=1, group=mesh["replicate"].get_group())
        if dist.get_rank() == 1:
            with torch.no_grad():
                local(net.first.weight)[0, 0] = float("nan")
        ours.updates.step()
        for found, expected in zip(weights(net), of_second, strict=True):
            assert torch.allclose(found, expected, atol=1e-6)
        assert ours.updates.metrics()["outer/workers"] == 1
        ours.train(2)
        assert all(bool(each.isfinite().all()) for each in weights(net))
        assert ours.updates.metrics()["outer/workers"] == 2


@pytest.mark.parametrize(
    ("weigh_by", "shares"),
    [("workers", (0.5, 0.5)), ("samples", (0.3, 0.7))],  # 1 + 2 and 3 + 4 of 10
)
def test_metrics_are_of_whole_pseudo_gradients(weigh_by: str, shares: tuple[float, float]) -> None:
    """Workers weigh by the samples of all their ranks."""
    mesh = mesh_of(2, 2)
    net = sharded(mesh["shard"], dtype=torch.float64)

    def whole() -> Tensor:
        return torch.cat([p.detach().full_tensor().reshape(-1) for p in net.parameters()])

    settings = {"method": "local_sgd", "sync_every": 1, "codec": "none", "weigh_by": weigh_by}
    with training(net, sgd, **settings) as ours:
        samples = [float(dist.get_rank() + 1)] if weigh_by == "samples" else []
        for _ in range(2):  # the second time by the weights of the first
            begin = whole()
            ours.learn()
            own = begin - whole()
            both = [own.clone() for _ in range(2)]
            for index, each in enumerate(both):
                dist.broadcast(each, group_src=index, group=mesh["replicate"].get_group())
            ours.updates.step(*samples)
        said = ours.updates.metrics()
    mean = shares[0] * both[0] + shares[1] * both[1]
    a, b = (2 * share * each for share, each in zip(shares, both, strict=True))
    squares = float(a @ a + b @ b) / 2
    assert torch.allclose(begin - whole(), mean, rtol=1e-9, atol=1e-12)
    assert said["outer/pseudo_gradient_norm"] == pytest.approx(float(mean.norm()))
    assert said["outer/drift"] == pytest.approx(squares**0.5)
    assert said["outer/cosine"] == pytest.approx(float(a @ b) / squares)
    assert torch.equal(both[mesh["replicate"].get_local_rank()], own)


def test_an_evaluation_with_the_anchor_or_the_own_weights_changes_nothing() -> None:
    mesh, trained = mesh_of(2, 2), []
    for evaluates in (False, True):
        net = sharded(mesh["shard"])
        with training(net, sync_every=2, codec="int8", **ALL) as ours:
            probe, outputs = torch.ones(1, WIDTH), []
            for _ in range(5):
                ours.learn()
                if evaluates:
                    with torch.no_grad():  # leaves gathered parameters behind
                        net(probe)
                ours.updates.step()
                if evaluates:
                    with torch.no_grad():
                        own = net(probe)
                        with ours.updates.anchor_weights():
                            outputs.append(net(probe))
                        assert torch.equal(own, net(probe))
            net.reshard()
            trained.append(weights(net))
            assert same_in_replicas(outputs, mesh), "of the anchor"
            ours.updates.finish()
            assert replicas_are_equal(net, mesh)
    assert all(map(torch.equal, *trained))


def test_memory_is_of_a_shard() -> None:
    """Anchor, outer momentum, residual and buffer, beside what FSDP2 has."""
    net = sharded(mesh_of(2, 2)["shard"])
    optimizer = sgd(net.parameters())
    optimizer.zero_grad()
    net(next(batches(torch.float32))).square().mean().backward()
    optimizer.step()
    shards = sum(local(p).nbytes for p in net.parameters())
    before = bytes_held()
    with training(net, sgd, sync_every=2, codec="int8", **ALL) as ours:
        ours.train(4)
        ours.optimizer.zero_grad()
        said = ours.updates.reducer.memory()
        added = bytes_held() - before
    assert 0.9 * shards < said["residual_bytes"] <= shards
    # Anchor, momentum and buffer.
    assert 2.9 * shards < added < 3 * shards + sum(said.values()) + (16 << 10)


def test_only_finite_gradients_that_wait_in_the_whole_worker_are_of_an_accumulation() -> None:
    mesh = mesh_of(2, 2)
    net = sharded(mesh["shard"])
    with training(net) as ours:
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        if mesh["shard"].get_local_rank() == 0:
            local(net.first.weight.grad).fill_(float("inf"))
        ours.updates.step()  # as after a step that a GradScaler has skipped
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(ValueError, match="gradient accumulation"):
            ours.updates.step()


def half_sharded(mesh: DeviceMesh) -> nn.Module:
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return net


def test_what_cannot_work_is_refused() -> None:
    mesh = mesh_of(2, 2)
    shard, flat = mesh["shard"], init_device_mesh("cpu", (4,))
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    offload = CPUOffloadPolicy(pin_memory=False)
    cases: list[tuple[str, nn.Module, dict[str, Any]]] = [
        ("sharded over all 4 ranks", sharded(flat), {}),
        ("call it with mesh", sharded(mesh), {}),
        ("as nothing averages the others", half_sharded(shard), {}),
        ("CPUOffloadPolicy", sharded(shard, offload_policy=offload), {}),
        (
            "leave parallelize_module out",
            sharded(cube["shard"], tensor=cube["tensor"], inner=36),
            {},
        ),
        ("got rank_groups; leave it out", sharded(shard), {"rank_groups": [[0, 1], [2, 3]]}),
        (
            "got a codec inside a node",
            sharded(shard),
            {"codec": {"intra": "bf16", "inter": "int8"}},
        ),
        ("leave ddp_steps out", sharded(shard), {"ddp_steps": 3}),
        ("sync_every", sharded(shard), {"sync_every": 4 + dist.get_rank()}),
    ]
    for says, net, settings in cases:
        with pytest.raises(ValueError, match=says):
            local_updates(net, sgd(net.parameters()), **settings)
    net = sharded(mesh["replicate"])
    with (
        patch.dict("os.environ", LIGHTNING_DIST_HOSTNAME=f"host{dist.get_rank() // 2}"),
        pytest.raises(ValueError, match="must be sharded inside a node"),
    ):
        local_updates(net, sgd(net.parameters()))


def test_a_state_that_cannot_be_saved_is_refused() -> None:
    shard = mesh_of(2, 2)["shard"]
    with (
        training(sharded(shard)) as ours,
        pytest.raises(
            ValueError, match=r"call lightning_dist\.local_updates in a loop of your own"
        ),
    ):
        ours.updates.sync.connect([ours.optimizer], Environment(saves_shards=False))
    net = fully_shard(nn.Linear(WIDTH, 34), mesh=shard)
    with training(net, sync_every=1, outer_optimizer=torch.optim.Adafactor) as ours:
        ours.train(1)
        with pytest.raises(ValueError, match="must have the shape of its parameter"):
            ours.updates.state_dict()
