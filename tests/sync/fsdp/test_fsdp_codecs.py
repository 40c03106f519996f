"""Codecs of sharded models (FSDP2), on real processes: conservation, resuming, overflow."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    batches,
    compressed,
    local,
    mesh_of,
    replicas_are_equal,
    same_in_replicas,
    sharded,
    train,
    weights,
)
from replicas import of_all
from test_fsdp import SHAPES
from tiers import some_exhaustive
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_dist.codecs import CODECS, by_name, resolve_codec, warmup
from lightning_dist.sync.fsdp.replicas import ShardedGradients, compress_fsdp

pytestmark = [pytest.mark.slow, pytest.mark.on_ranks(4)]
SOME = {"none", "bf16", "int8", "topk", "threshold", "powersgd"}
"""One of each kind."""
EVERY = {name: name for name in CODECS} | {"dgc": "dgc:momentum=0.0"}
"""Codecs by name; with a momentum, ``dgc`` sums momenta and not gradients."""
FED_BACK = [name for name, codec in EVERY.items() if resolve_codec(codec).keeps_residual]
"""Those with error feedback."""
LOST = {"fp16": 2 * 2.0**-11, "bf16": 2 * 2.0**-8, "qsgd": 5.0, "terngrad": 5.0}
"""Casts round to nearest; unbiased codecs miss by chance alone: in standard errors."""


@pytest.mark.parametrize("codec", some_exhaustive(CODECS, {*CODECS} - SOME))
def test_replicas_stay_equal_and_fewer_bytes_travel(codec: str) -> None:
    mesh = mesh_of(2, 2)

    def require_equal() -> None:
        assert replicas_are_equal(net, mesh)

    with compressed(mesh, codec, net=sharded(mesh["shard"], unequal=True)) as (net, ours):
        train(net, ours=ours, accumulate=True, after_step=require_equal)
        step = ours.comm_stats()["last_step"]
    assert all(bool(held.isfinite().all()) for held in weights(net))
    bounds = {"none": (0.99, 1.01), "bf16": (0.495, 0.505), "int8": (0.0, 0.35)}
    low, high = bounds.get(codec, (0.0, 1.01))
    assert low < step["wire_bytes"] / step["raw_bytes"] < high


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "codec",
    ["int4", "topk:ratio=0.05", "powersgd:rank=2", warmup({0: "int4", 3: "none"})],
    ids=str,
)
def test_what_was_applied_and_is_owed_is_the_sum_of_the_exact_means(codec: Any) -> None:
    """Of real gradients, in 20 steps; a codec that keeps nothing sends what is owed once."""
    mesh = mesh_of(2, 2)
    exact = sharded(mesh)
    applied, wanted = ([torch.zeros_like(w).double() for w in weights(exact)] for _ in range(2))
    with compressed(mesh, codec) as (net, ours):
        for first, _ in batches(20):
            for model, sums in ((net, applied), (exact, wanted)):
                model.zero_grad()
                model(first).square().mean().backward()
                for parameter, total in zip(model.parameters(), sums, strict=True):
                    total += local(parameter.grad)
        assert bool(ours.reducer.residuals) == isinstance(codec, str)
        for (name, _), got, want in zip(net.named_parameters(), applied, wanted, strict=True):
            if got.numel():
                error = (got + owed(ours, name, got, mesh) - want).norm()
                assert error < 1e-5 * want.norm().clamp(min=1e-30), name


def owed(ours: ShardedGradients, name: str, like: Tensor, mesh: DeviceMesh) -> Tensor:
    """Mean residual of this shard over the replicas."""
    kept = torch.zeros_like(like)
    kept += ours.reducer.residuals.get(name, kept).view_as(kept)
    dist.all_reduce(kept, group=mesh["replicate"].get_group())
    return kept / mesh["replicate"].size()


class GivenGradients(nn.Module):
    """A matrix for each codec, whose gradient is the input: the mean over ranks is known."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        weights = {name: nn.Parameter(torch.zeros(17, 12).double()) for name in names}
        self.weights = nn.ParameterDict(weights)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.stack(list(self.weights.values())) * x).sum()

    @staticmethod
    def compressed(
        mesh: DeviceMesh, names: Sequence[str], **settings: Any
    ) -> tuple[nn.Module, ShardedGradients]:
        net = fully_shard(GivenGradients(names), mesh=mesh["shard"])
        codec = by_name("none", {rf"\b{name}$": EVERY[name] for name in names})
        return net, compress_fsdp(net, codec, mesh=mesh, min_compress_numel=0, **settings)


def given(rank: int, step: int, names: Sequence[str]) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(len(names), 17, 12, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("steps", "state_update"),
    [
        (60, "immediate"),
        (60, "deferred"),
        pytest.param(1000, "immediate", marks=pytest.mark.exhaustive),
    ],
)
def test_every_codec_conserves_mass(steps: int, state_update: str) -> None:
    """In float64."""
    mesh = mesh_of(2, 2)
    net, ours = GivenGradients.compressed(mesh, list(EVERY), state_update=state_update)
    shard, shards = mesh["shard"].get_local_rank(), mesh["shard"].size()
    wanted, difference, spread = torch.zeros(
        3, *given(0, 0, EVERY).chunk(shards, 1)[shard].shape, dtype=torch.float64
    )
    for step in range(steps):
        of_ranks = [given(rank, step, EVERY) for rank in range(dist.get_world_size())]
        net.zero_grad()
        net(of_ranks[dist.get_rank()]).backward()
        got = torch.stack([local(parameter.grad) for parameter in net.parameters()])
        want = torch.stack(of_ranks).mean(0).chunk(shards, 1)[shard]
        wanted += want
        difference += got - want
        spread += (got - want).square()
    for name, want, error, squares in zip(net.weights, wanted, difference, spread, strict=True):
        assert same_in_replicas([error], mesh), name
        if name in ("qsgd", "terngrad"):
            lost = float((error.abs() / squares.sqrt()).max())
        else:
            error = error + owed(ours, f"weights.{name}", error, mesh)
            lost = float(error.norm() / want.norm())
        assert lost < LOST.get(name, 1e-10), name
    assert {name.removeprefix("weights.") for name in ours.reducer.residuals} == {*FED_BACK}
    ours.close()


@pytest.mark.parametrize(("replicas", "shards"), SHAPES)
def test_gradients_of_a_resumed_run_are_those_of_one_that_was_not_interrupted(
    replicas: int, shards: int
) -> None:
    mesh, codecs = mesh_of(replicas, shards), list(CODECS)
    policy = by_name("none", {rf"\b{name}$": name for name in codecs})

    def begin(state: Mapping[str, Any] | None = None) -> tuple[nn.Module, ShardedGradients]:
        net = fully_shard(GivenGradients(codecs).float(), mesh=mesh["shard"])
        ours = compress_fsdp(net, policy, mesh=mesh, min_compress_numel=0)
        ours.load_state_dict(state)
        return net, ours

    def gradients(net: nn.Module, steps: range) -> Tensor:
        """``(codecs, steps, rows, columns)`` of this shard."""
        found = []
        for step in steps:
            net.zero_grad()
            net(given(dist.get_rank(), step, codecs).float()).backward()
            found.append(torch.stack([local(p.grad) for p in net.parameters()]))
        return torch.stack(found, 1)

    net, straight = begin()
    gradients(net, range(3))
    state, *_ = of_all(straight.state_dict())
    assert all(each.shape == (replicas, 17 * 12) for each in state["residuals"].values())
    expected = gradients(net, range(3, 6))
    straight.close()
    net, resumed = begin(state)
    got = gradients(net, range(3, 6))
    resumed.close()
    for name, *two in zip(net.weights, expected, got, strict=True):
        assert torch.equal(*two), name


@pytest.mark.parametrize("state_update", ["immediate", "deferred"])
def test_an_inf_on_one_rank_is_seen_everywhere_and_the_next_step_is_clean(
    state_update: str,
) -> None:
    """The deferred update leaves no trace of it."""
    mesh = mesh_of(2, 2)
    net, ours = GivenGradients.compressed(mesh, FED_BACK, state_update=state_update)

    def gradients(factor: float = 1.0) -> list[Tensor]:
        net.zero_grad()
        x = given(dist.get_rank(), 0, FED_BACK)
        net(x * (factor if dist.get_rank() == 0 else 1.0)).backward()
        return [local(p.grad).clone() for p in net.parameters()]

    gradients()
    before = {n: held.clone() for n, held in ours.reducer.residuals.items()}
    assert not any(bool(each.isfinite().all()) for each in gradients(torch.inf))
    held = ours.reducer.residuals
    assert len(held) == len(FED_BACK)
    for name, of in held.items():
        assert of.isfinite().all(), name
        assert state_update == "immediate" or torch.equal(before[name], of), name
    clean = gradients()
    assert all(bool(each.isfinite().all()) for each in clean)
    assert same_in_replicas(clean, mesh)
    ours.close()
