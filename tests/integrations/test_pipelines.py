"""Pipeline parallelism: each stage in DDP over its replicas, whose gradients are compressed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replicas import of_all
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import compress_ddp

WIDTH, MICRO_BATCHES, STEPS = 48, 4, 3
SCHEDULES = [(ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)]
"""Each with its stages on one rank."""


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(schedule: Callable[..., Any], per_rank: int, codec: str | None) -> dict[str, Any]:
    """Weights by stage and the steps that each reducer counts: 2 replicas of 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, place = mesh.get_coordinate() or (0, 0)
    pipeline, replicas = mesh["stage"].get_group(), mesh["replica"].get_group()
    count = 2 * per_rank
    own = range(place, count, 2)
    model = layers(count)
    wrapped = {at: DistributedDataParallel(model[at], process_group=replicas) for at in own}
    reducers = {}
    if codec is not None:
        settings: dict[str, Any] = {"min_compress_numel": 0, "compile_kernels": False}
        reducers = {at: compress_ddp(each, codec, **settings) for at, each in wrapped.items()}
    first, other = (torch.empty(2, WIDTH, requires_grad=at > 0) for at in range(2))
    stages = [
        PipelineStage(each, at, count, first.device, other if at else first, other, group=pipeline)
        for at, each in wrapped.items()
    ]
    run = schedule(
        stages if per_rank > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=loss_of
    )
    parameters = [p for each in wrapped.values() for p in each.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    generator = torch.Generator().manual_seed(replica)
    for _ in range(STEPS):
        inputs, targets = torch.randn(2, 2 * MICRO_BATCHES, WIDTH, generator=generator)
        given: Sequence[Tensor] = (inputs,) if place == 0 else ()
        run.step(*given, **({"target": targets} if place == 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
    weights = {
        f"{at}.{name}": p.detach().clone()
        for at, each in wrapped.items()
        for name, p in each.module.named_parameters()
    }
    steps = [each.comm_stats()["steps"] for each in reducers.values()]
    for each in reducers.values():
        each.close()
    return {"weights": weights, "steps": steps}


def trained(schedule: Callable[..., Any], per_rank: int, codec: str | None) -> dict[str, Tensor]:
    """The weights of this rank, after a look at all ranks: replicas are equal."""
    found = train(schedule, per_rank, codec)
    assert found["steps"] == [STEPS] * (0 if codec is None else per_rank)
    weights: dict[str, Tensor] = found["weights"]
    for other in of_all(weights):
        for name in other.keys() & weights.keys():
            assert torch.equal(other[name], weights[name]), name
    return weights


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
def test_stages_are_compressed_in_their_replicas(
    schedule: Callable[..., Any], per_rank: int
) -> None:
    """``none`` has the bits of DDP; int8 is near, and its replicas are equal."""
    start = {
        f"{at}.{name}": p
        for at, layer in enumerate(layers(2 * per_rank))
        for name, p in layer.named_parameters()
    }
    plain = trained(schedule, per_rank, None)
    same = trained(schedule, per_rank, "none")
    assert plain.keys() == same.keys()
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    near = trained(schedule, per_rank, "int8")
    for name, weight in near.items():
        moved = (plain[name] - start[name]).norm()
        assert 0 < (weight - plain[name]).norm() < 0.1 * moved, name
    dist.barrier()
