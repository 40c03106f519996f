"""Codecs under FSDP2, scenarios of `fsdp_ranks.py`: conservation, resuming, overflow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fsdp_models import (
    STEPS,
    batches,
    local,
    replicas_are_equal,
    same_in_replicas,
    sharded,
    train,
    weights,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    fully_shard,
)

from lightning_dist.codecs import CODECS, by_name, resolve_codec
from lightning_dist.integrations.torch.fsdp.attach import compress_fsdp
from lightning_dist.integrations.torch.fsdp.replicas import ShardedGradients


def some_codecs(mesh: DeviceMesh) -> dict[str, tuple[bool, bool, int]]:
    """One of each kind, as :func:`every_codec`."""
    return of_codecs(mesh, ("none", "bf16", "int8", "topk", "threshold", "powersgd"))


def every_codec(mesh: DeviceMesh) -> dict[str, tuple[bool, bool, int]]:
    return of_codecs(mesh, CODECS)


def of_codecs(mesh: DeviceMesh, codecs: Iterable[str]) -> dict[str, tuple[bool, bool, int]]:
    """Replicas equal after every step, weights finite and bytes of the last step, by codec."""
    found = {}
    for name in codecs:
        net = sharded(mesh["shard"], unequal=True)
        ours = compress_fsdp(net, name, mesh=mesh, min_compress_numel=0)
        equal: list[bool] = []
        train(
            net,
            ours=ours,
            accumulate=True,
            after_step=lambda net=net, equal=equal: equal.append(replicas_are_equal(net, mesh)),
        )
        finite = all(bool(held.isfinite().all()) for held in weights(net))
        sent = ours.comm_stats()["last_step"]["wire_bytes"]
        found[name] = equal == [True] * STEPS, finite, int(sent)
        ours.close()
    return found


def conservation(mesh: DeviceMesh) -> dict[str, float]:
    """Relative difference of what was applied and is owed from the sum of the exact means."""
    found = {}
    for codec in ("int4", "topk:ratio=0.05", "powersgd:rank=2"):
        net, exact = sharded(mesh["shard"]), sharded(mesh)
        ours = compress_fsdp(net, codec, mesh=mesh, min_compress_numel=0)
        applied = [torch.zeros_like(w, dtype=torch.float64) for w in weights(net)]
        wanted = [torch.zeros_like(w, dtype=torch.float64) for w in weights(net)]
        for first, _ in batches(20):
            for model, sums in ((net, applied), (exact, wanted)):
                model.zero_grad()
                model(first).square().mean().backward()
                for parameter, total in zip(model.parameters(), sums, strict=True):
                    total += local(parameter.grad)
        worst = 0.0
        names = [name for name, _ in net.named_parameters()]
        for name, got, want in zip(names, applied, wanted, strict=True):
            if got.numel():
                error = (got + owed(ours, name, got, mesh) - want).norm()
                worst = max(worst, float(error / want.norm().clamp(min=1e-30)))
        found[codec] = worst
        ours.close()
    return found


def owed(ours: ShardedGradients, name: str, like: Tensor, mesh: DeviceMesh) -> Tensor:
    """Mean residual of this shard over the replicas."""
    kept = torch.zeros_like(like)
    kept += ours.reducer.residuals.get(name, kept).view_as(kept)
    dist.all_reduce(kept, group=mesh["replicate"].get_group())
    return kept / mesh["replicate"].size()


EVERY = {name: name for name in CODECS} | {"dgc": "dgc:momentum=0.0"}
"""Codecs by name; with a momentum, ``dgc`` sums momenta and not gradients."""
FED_BACK = [name for name, codec in EVERY.items() if resolve_codec(codec).keeps_residual]
"""Those with error feedback."""
UNBIASED = ("qsgd", "terngrad")


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


def conservation_of_every_codec(mesh: DeviceMesh) -> dict[str, dict[str, float]]:
    """What every codec loses in 60 steps."""
    return {commit: lost(mesh, 60, commit=commit) for commit in ("immediate", "deferred")}


def conservation_of_a_long_run(mesh: DeviceMesh) -> dict[str, dict[str, float]]:
    return {"immediate": lost(mesh, 1000)}


def lost(mesh: DeviceMesh, steps: int, **settings: Any) -> dict[str, float]:
    """Difference of what was applied and is owed from the sum of the exact means, relative.

    For unbiased codecs, the largest difference of an element, in standard errors.
    """
    net, ours = GivenGradients.compressed(mesh, list(EVERY), **settings)
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
    found = {}
    for name, want, error, squares in zip(net.weights, wanted, difference, spread, strict=True):
        assert same_in_replicas([error], mesh), f"{name}: replicas differ"
        if name in UNBIASED:
            found[name] = float((error.abs() / squares.sqrt()).max())
        else:
            error = error + owed(ours, f"weights.{name}", error, mesh)
            found[name] = float(error.norm() / want.norm())
    kept = {name.removeprefix("weights.") for name in ours.reducer.residuals}
    assert kept == set(FED_BACK), kept
    ours.close()
    return found


def resume_of_every_codec(mesh: DeviceMesh) -> dict[str, bool]:
    """Gradients of an interrupted run, against those of one that was not, by codec."""
    codecs = list(CODECS)
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
    shared = [straight.state_dict()]
    dist.broadcast_object_list(shared)
    expected = gradients(net, range(3, 6))
    straight.close()
    net, resumed = begin(shared[0])
    got = gradients(net, range(3, 6))
    resumed.close()
    return {name: torch.equal(*two) for name, *two in zip(net.weights, expected, got, strict=True)}


def overflow(mesh: DeviceMesh) -> dict[str, bool]:
    """An inf on one rank: seen everywhere, and the next step is clean; the deferred commit leaves
    no trace of it.
    """
    facts = {}
    for commit in ("immediate", "deferred"):
        net, ours = GivenGradients.compressed(mesh, FED_BACK, commit=commit)

        def gradients(factor: float = 1.0, net: nn.Module = net) -> list[Tensor]:
            net.zero_grad()
            x = given(dist.get_rank(), 0, FED_BACK)
            net(x * (factor if dist.get_rank() == 0 else 1.0)).backward()
            return [local(p.grad).clone() for p in net.parameters()]

        gradients()
        before = {n: held.clone() for n, held in ours.reducer.residuals.items()}
        facts[f"{commit}: seen"] = not any(bool(g.isfinite().all()) for g in gradients(torch.inf))
        held = ours.reducer.residuals
        facts[f"{commit}: residuals"] = len(held) == len(FED_BACK) and all(
            torch.equal(before[name], of) if commit == "deferred" else bool(of.isfinite().all())
            for name, of in held.items()
        )
        clean = gradients()
        facts[f"{commit}: clean"] = all(bool(g.isfinite().all()) for g in clean)
        facts[f"{commit}: equal"] = same_in_replicas(clean, mesh)
        ours.close()
    return facts
