"""Pipeline parallelism: each stage in DDP over its replicas, whose gradients are compressed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from needs import needs
from replicas import of_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import compress_ddp, compress_fsdp
from lightning_dist.base.features import FSDP
from lightning_dist.base.versions import release

pytestmark = pytest.mark.skipif(
    release(torch.__version__) < (2, 11), reason="pipelines of this torch fail over gloo"
)
WIDTH, MICRO_BATCHES, STEPS = 48, 4, 3
SCHEDULES = [(ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)]
"""Each with its stages on one rank."""


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def stage_of(model: nn.Module, place: int, count: int, group: dist.ProcessGroup) -> PipelineStage:
    first, other = (torch.empty(2, WIDTH, requires_grad=at > 0) for at in range(2))
    shapes = (other if place else first, other)
    return PipelineStage(model, place, count, first.device, *shapes, group=group)


def steps_of(run: Any, parameters: Iterable[nn.Parameter], place: int, data: int) -> None:
    """Trains on the ``data`` of a replica; ``place``: of this rank's first stage."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    generator = torch.Generator().manual_seed(data)
    for _ in range(STEPS):
        inputs, targets = torch.randn(2, 2 * MICRO_BATCHES, WIDTH, generator=generator)
        given: Sequence[Tensor] = (inputs,) if place == 0 else ()
        run.step(*given, **({"target": targets} if place == 1 else {}))
        optimizer.step()
        optimizer.zero_grad()


def train(
    schedule: Callable[..., Any], per_rank: int, codec: str | None, replicas: int, **settings: Any
) -> dict[str, Any]:
    """Weights by stage and the steps that each reducer counts, of replicas of 2 ranks."""
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replica", "stage"))
    replica, place = mesh.get_coordinate() or (0, 0)
    pipeline, group = mesh["stage"].get_group(), mesh["replica"].get_group()
    count = 2 * per_rank
    model = layers(count)
    wrapped = {
        at: DistributedDataParallel(model[at], process_group=group) for at in range(place, count, 2)
    }
    reducers = {}
    if codec is not None:
        settings |= {"min_compress_numel": 0, "compile_kernels": False}
        reducers = {at: compress_ddp(each, codec, **settings) for at, each in wrapped.items()}
    stages = [stage_of(each, at, count, pipeline) for at, each in wrapped.items()]
    run = schedule(
        stages if per_rank > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=loss_of
    )
    steps_of(run, (p for each in wrapped.values() for p in each.parameters()), place, replica)
    weights = {
        f"{at}.{name}": p.detach().clone()
        for at, each in wrapped.items()
        for name, p in each.module.named_parameters()
    }
    steps = [each.comm_stats()["steps"] for each in reducers.values()]
    for each in reducers.values():
        each.close()
    return {"weights": weights, "steps": steps}


def trained(
    schedule: Callable[..., Any],
    per_rank: int,
    codec: str | None,
    replicas: int = 2,
    **settings: Any,
) -> dict[str, Tensor]:
    """The weights of this rank, after a look at all ranks: replicas are equal."""
    found = train(schedule, per_rank, codec, replicas, **settings)
    assert found["steps"] == [STEPS] * (0 if codec is None else per_rank)
    weights: dict[str, Tensor] = found["weights"]
    for other in of_all(weights):
        for name in other.keys() & weights.keys():
            assert torch.equal(other[name], weights[name]), name
    return weights


def moved_alike(near: Mapping[str, Tensor], plain: Mapping[str, Tensor], count: int) -> None:
    """``near`` is not ``plain``, and ends near it, measured by the way from the start."""
    start = {
        f"{at}.{name}": p
        for at, layer in enumerate(layers(count))
        for name, p in layer.named_parameters()
    }
    for name, weight in near.items():
        moved = (plain[name] - start[name]).norm()
        assert 0 < (weight - plain[name]).norm() < 0.1 * moved, name


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
def test_stages_are_compressed_in_their_replicas(
    schedule: Callable[..., Any], per_rank: int
) -> None:
    """``none`` has the bits of DDP; int8 is near, and its replicas are equal."""
    plain = trained(schedule, per_rank, None)
    same = trained(schedule, per_rank, "none")
    assert plain.keys() == same.keys()
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    moved_alike(trained(schedule, per_rank, "int8"), plain, 2 * per_rank)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.on_ranks(8)
@pytest.mark.parametrize("form", [True, "leader"])
def test_replicas_of_a_stage_in_a_hierarchy(form: bool | str) -> None:
    nodes = {"hierarchical": form, "rank_groups": [[0, 1], [2, 3]]}
    plain = trained(Schedule1F1B, 1, None, replicas=4)
    moved_alike(trained(Schedule1F1B, 1, "int8", replicas=4, **nodes), plain, 2)
    dist.barrier()


def sharded_stage(mesh: DeviceMesh, over: DeviceMesh) -> tuple[FSDPModule, Any]:
    """The two layers of this rank's stage, sharded ``over``, and a schedule of two stages."""
    place = mesh.get_local_rank("stage")
    model = nn.Sequential(*layers(4)[2 * place : 2 * place + 2])
    for each in (*model, model):
        fully_shard(each, mesh=over)
    stage = stage_of(model, place, 2, mesh.get_group("stage"))
    run = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    assert isinstance(model, FSDPModule)
    return model, run


def train_sharded(codec: str | None) -> dict[str, Tensor]:
    """Shards of this rank, with or without our exchange: 2 stages, 2 replicas of 2 ranks each."""
    names = ("stage", "replicate", "shard")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    both = mesh["replicate", "shard"]
    model, run = sharded_stage(mesh, both if codec is None else mesh["shard"])
    if codec is not None:
        gradients = compress_fsdp(model, codec, mesh=both, min_compress_numel=0)
    steps_of(run, model.parameters(), mesh.get_local_rank("stage"), dist.get_rank() % 4)
    if codec is not None:
        assert gradients.comm_stats()["steps"] == STEPS
        gradients.close()
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters()}


@needs(FSDP)
@pytest.mark.slow
@pytest.mark.on_ranks(8)
def test_stages_sharded_in_replicas() -> None:
    """``none`` has the bits of FSDP2 over both dimensions."""
    plain, same, near = (train_sharded(codec) for codec in (None, "none", "int8"))
    assert plain.keys() == same.keys()
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    for name, weight in near.items():
        assert 0 < (weight - plain[name]).norm() < 0.1 * plain[name].norm(), name


@needs(FSDP)
@pytest.mark.on_ranks(4)
def test_stages_sharded_over_all_ranks() -> None:
    """With compressed parameters: the steps of the training are counted."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    place, trained = mesh.get_local_rank("stage"), []
    for codec in (None, "qsgd:bits=8"):
        model, run = sharded_stage(mesh, mesh["shard"])
        if codec is not None:
            given = {"parameters": "none", "min_compress_numel": 0}
            shards = compress_fsdp(model, codec, mesh=mesh["shard"], **given)
        steps_of(run, model.parameters(), place, dist.get_rank() % 2)
        trained.append([p.to_local().detach().clone() for p in model.parameters()])
    assert shards.comm_stats()["steps"] == STEPS
    shards.close()
    for near, plain in zip(*trained, strict=True):
        assert 0 < (near - plain).norm() < 0.1 * plain.norm()


def one_stage(mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    """A layer with parameters that nothing uses, and a schedule of it alone."""
    model = nn.Sequential(*layers(1))
    model[0][1].unused = nn.Linear(8, 8)  # the activation does not call it
    for each in (model[0][1].unused, model):
        fully_shard(each, mesh=mesh["shard"])
    stage = stage_of(model, 0, 1, mesh.get_group("stage"))
    return model, Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of)


@needs(FSDP)
@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("parameters", [None, "none"])
def test_a_group_of_a_stage_without_gradients(parameters: str | None) -> None:
    """It is left out, and the others are averaged before the optimizer steps."""
    shape = (1, 2, 1) if parameters is None else (1, 1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("stage", "replicate", "shard"))
    model, run = one_stage(mesh)
    over = mesh["replicate", "shard"] if parameters is None else mesh["shard"]
    codec = "int8" if parameters is None else "qsgd:bits=8"
    given: Any = {"parameters": parameters, "min_compress_numel": 0}
    gradients = compress_fsdp(model, codec, mesh=over, **given)
    data = torch.full((4, WIDTH), float(dist.get_rank()))
    for steps in (1, 2):
        run.step(data, target=data + 1)
        assert gradients.comm_stats()["steps"] == steps
        found = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        assert len(found) == 2
        if parameters is None:
            assert all(all(map(torch.equal, found, other)) for other in of_all(found))
        model.zero_grad()
    gradients.close()


@needs(FSDP)
@pytest.mark.on_ranks(2)
def test_a_step_whose_reductions_nobody_waited_for_is_an_error() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))
    model, run = one_stage(mesh)
    given: Any = {"mesh": mesh["replicate", "shard"], "min_compress_numel": 0}
    gradients = compress_fsdp(model, "int8", **given)
    gradients.backward.queue()  # as the first gradient that is reduced does
    data = torch.ones(4, WIDTH)
    with pytest.raises(RuntimeError, match="of this stage were not averaged"):
        model(data)
    run.step(data, target=data)
    assert gradients.comm_stats()["steps"] == 1
    gradients.close()


@needs(FSDP)
@pytest.mark.on_ranks(2)
def test_stages_that_are_compressed_together_are_refused() -> None:
    """Each is reduced by itself, and divided by the micro-batches after that."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))
    model, run = one_stage(mesh)
    compress_fsdp(nn.ModuleList([model]), "int8", mesh=mesh["replicate", "shard"])
    data = torch.ones(4, WIDTH)
    with pytest.raises(RuntimeError, match="call both for each stage"):
        run.step(data, target=data)
