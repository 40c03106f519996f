"""What ranks do that hold a model in shards on each host, with local steps between the hosts:
started by `test_local_shards.py`.

torchrun local_shard_ranks.py FOLDER SCENARIO...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    WIDTH,
    Net,
    bytes_held,
    local,
    raised,
    replicas_are_equal,
    same_in_replicas,
    sharded,
    weights,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_dist import local_updates
from lightning_dist.integrations.torch.local.outer_steps import LocalUpdates
from lightning_dist.integrations.torch.local.state import WorkerStates

FOLDER = Path(sys.argv[1])
STREAMING = {
    "method": "streaming",
    "sync_every": 16,
    "fragments": 8,  # an exchange every other step
    "overlap_steps": 1,
    "codec": "int4",
    "min_compress_numel": 0,
}
"""A fragment of the head of one row, of which one of the shards has nothing."""


def batches(dtype: torch.dtype, *, seed: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    while True:
        yield torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


@dataclass
class Training:
    """Local steps of this rank's worker."""

    net: Any
    optimizer: torch.optim.Optimizer
    updates: LocalUpdates
    data: Iterator[Tensor]

    def learn(self) -> None:
        self.optimizer.zero_grad()
        self.net(next(self.data)).square().mean().backward()
        self.optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.learn()
            self.updates.step()

    def anchors(self) -> list[Tensor]:
        found = self.updates.anchor_state_dict()
        return [local(each).clone() for each in found.values() if isinstance(each, DTensor)]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)


@contextmanager
def training(
    net: Any,
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adam,
    **settings: Any,
) -> Iterator[Training]:
    optimizer = make(net.parameters())
    updates = local_updates(net, optimizer, **settings)
    dtype = next(net.parameters()).dtype
    try:
        yield Training(net, optimizer, updates, batches(dtype))
    finally:
        updates.close()


def equal_to_hsdp(mesh: DeviceMesh) -> dict[str, bool]:
    """A local step and its mean are a step of HSDP: plain SGD inside and outside, uncompressed."""
    found = {}
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
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
            pairs = list(zip(weights(native), weights(net), strict=True))
            found[str(dtype)] = all(
                torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs
            )
            found[f"{dtype}: equal"] = replicas_are_equal(net, mesh)
    return found


def anchors_are_equal(mesh: DeviceMesh) -> dict[str, bool]:
    """Of the same shard in all workers, bit for bit, at every step; workers differ between."""
    cases: dict[str, dict[str, Any]] = {
        "int8": {"sync_every": 2, "codec": "int8", "min_compress_numel": 0},
        "powersgd": {"sync_every": 2, "codec": "powersgd", "min_compress_numel": 0},
        "sparseloco": {"method": "sparseloco", "sync_every": 2, "min_compress_numel": 0},
        "streaming": STREAMING,
    }
    found = {}
    for name, settings in cases.items():
        net = sharded(mesh["shard"], unequal=True)
        with training(net, **settings) as ours:
            equal, apart, moved = [], [], []
            is_first = mesh["replicate"].get_local_rank() == 0
            begin = ours.anchors()
            for _ in range(9):
                ours.train(1)
                equal.append(same_in_replicas(ours.anchors(), mesh))
                own = torch.cat([each.reshape(-1) for each in weights(net)])
                apart.append(not same_in_replicas([own], mesh) or is_first)
                moved.append(not all(map(torch.equal, begin, ours.anchors())))
            found[name] = all(equal) and any(moved)
            found[f"{name}: apart"] = any(apart)
            sent = ours.updates.comm_stats()
            found[f"{name}: bytes"] = 0 < sent["wire_bytes"] < 0.5 * sent["raw_bytes"]
    return found


def resumed(mesh: DeviceMesh) -> dict[str, bool]:
    """Interrupted in a window, or in an exchange: the bits of a run that was not."""
    cases: dict[str, dict[str, Any]] = {
        "window": {"sync_every": 4, "codec": "int8", "min_compress_numel": 0},
        "exchange": {"sync_every": 5, "overlap_steps": 3, "codec": "int4", "min_compress_numel": 0},
        "Adam outside": {
            "sync_every": 3,
            "outer_optimizer": lambda each: torch.optim.AdamW(each, lr=0.01),
        },
        "streaming": STREAMING,
    }
    found = {}
    for name, settings in cases.items():
        path = FOLDER / f"{name}.rank{dist.get_rank()}.pt"
        net = sharded(mesh["shard"])
        with training(net, **settings) as ours:
            ours.train(6)
            shared = [ours.updates.state_dict()]
            own = {"model": net.state_dict(), "optimizer": ours.optimizer.state_dict()}
            torch.save(own, path)
            ours.data = batches(torch.float32, seed=1)
            ours.train(7)
            straight = [*weights(net), *ours.anchors()]
        dist.broadcast_object_list(shared)
        net = sharded(mesh["shard"], unequal=True)
        with training(net, **settings) as ours:
            own = torch.load(path, weights_only=True)
            net.load_state_dict(own["model"])
            ours.optimizer.load_state_dict(own["optimizer"])
            ours.updates.load_state_dict(shared[0])
            ours.data = batches(torch.float32, seed=1)
            ours.train(7)
            found[name] = all(map(torch.equal, straight, [*weights(net), *ours.anchors()]))
    return found


def another_mesh(mesh: DeviceMesh) -> dict[str, bool]:
    """The state has whole parameters: other workers start from the same anchor and momentum."""
    net = sharded(mesh["shard"])
    with training(net, sync_every=2, codec="none") as ours:
        ours.train(5)
        shared = [ours.updates.state_dict()]
    dist.broadcast_object_list(shared)
    (state,) = shared
    plain = Net()
    with training(plain, sync_every=2, codec="none") as ours:
        ours.updates.load_state_dict(state)
        ours.updates.start_from_anchor()
        pairs = [(dict(plain.named_parameters())[n], a) for n, a in state["anchor"].items()]
        equal = all(torch.equal(p.detach(), a) for p, a in pairs) and len(pairs) == 18
        ours.train(2)
        held = ours.updates.outer_optimizer.state_dict()["state"]
        momenta = all(each["momentum_buffer"].dim() for each in held.values())
    return {"equal": equal, "momenta": momenta and len(held) == 18}


def not_finite(mesh: DeviceMesh) -> dict[str, bool]:
    """One shard of a worker is not finite: the worker is left out, with all of its shards."""
    net = sharded(mesh["shard"])
    with training(net, method="local_sgd", sync_every=2, codec="none") as ours:
        ours.train(1)
        ours.learn()
        own = weights(net)
        if dist.get_rank() == 1:
            with torch.no_grad():
                local(net.first.weight)[0, 0] = float("nan")
        ours.updates.step()
        group, of_second = mesh["replicate"].get_group(), []
        for each in own:
            dist.broadcast(each, group_src=1, group=group)
            of_second.append(each)
        pairs = list(zip(weights(net), of_second, strict=True))
        workers = ours.updates.metrics()["outer/workers"]
        ours.train(2)
        goes_on = all(bool(each.isfinite().all()) for each in weights(net))
        goes_on = goes_on and ours.updates.metrics()["outer/workers"] == 2
    return {
        "left out": workers == 1,
        "the other's": all(torch.allclose(a, b, atol=1e-6) for a, b in pairs),
        "goes on": goes_on,
    }


def metrics(mesh: DeviceMesh) -> dict[str, bool]:
    """Those of whole pseudo-gradients; workers weigh by the samples of all their ranks."""
    found = {}
    for weigh_by in ("workers", "samples"):
        net = sharded(mesh["shard"], dtype=torch.float64)
        settings = {"method": "local_sgd", "sync_every": 1, "codec": "none", "weigh_by": weigh_by}
        with training(net, sgd, **settings) as ours:
            worker, rank = mesh["replicate"].get_local_rank(), dist.get_rank()
            share = [0.5, 0.5] if weigh_by == "workers" else [3 / 10, 7 / 10]  # 1 + 2, 3 + 4
            for _ in range(2):  # the second time by the weights of the first
                begin = [p.detach().full_tensor() for p in net.parameters()]
                ours.learn()
                ends = [p.detach().full_tensor() for p in net.parameters()]
                own = torch.cat([(a - b).reshape(-1) for a, b in zip(begin, ends, strict=True)])
                both = [own.clone() for _ in range(2)]
                for index, each in enumerate(both):
                    dist.broadcast(each, group_src=index, group=mesh["replicate"].get_group())
                ours.updates.step(*([float(rank + 1)] if weigh_by == "samples" else []))
            mean = share[0] * both[0] + share[1] * both[1]
            moved = [p.detach().full_tensor() for p in net.parameters()]
            moved = torch.cat([(a - b).reshape(-1) for a, b in zip(begin, moved, strict=True)])
            said = ours.updates.metrics()
            a, b = (2 * s * each for s, each in zip(share, both, strict=True))
            squares = float(a @ a + b @ b) / 2
            found[weigh_by] = torch.allclose(moved, mean, rtol=1e-9, atol=1e-12)
            found[f"{weigh_by}: norm"] = said["outer/pseudo_gradient_norm"] == pytest.approx(
                float(mean.norm())
            )
            found[f"{weigh_by}: drift"] = said["outer/drift"] == pytest.approx(squares**0.5)
            found[f"{weigh_by}: cosine"] = said["outer/cosine"] == pytest.approx(
                float(a @ b) / squares
            )
            found[f"{weigh_by}: worker"] = torch.equal(both[worker], own)
    return found


def evaluated(mesh: DeviceMesh) -> dict[str, bool]:
    """With the anchor's weights or the worker's own: it changes nothing in the training."""
    trained = []
    for evaluates in (False, True):
        net = sharded(mesh["shard"])
        with training(net, sync_every=2, codec="int8", min_compress_numel=0) as ours:
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
            equal = same_in_replicas([torch.cat(outputs)] if outputs else [], mesh)
            ours.updates.finish()
            ended = replicas_are_equal(net, mesh)
    return {"same training": all(map(torch.equal, *trained)), "anchor": equal, "end": ended}


def memory(mesh: DeviceMesh) -> dict[str, bool]:
    """Anchor, outer momentum, residual and buffer are of a shard, beside what FSDP2 has."""
    net = sharded(mesh["shard"])
    optimizer = sgd(net.parameters())
    optimizer.zero_grad()
    net(next(batches(torch.float32))).square().mean().backward()
    optimizer.step()
    shards = sum(local(p).nbytes for p in net.parameters())
    before = bytes_held()
    with training(net, sgd, sync_every=2, codec="int8", min_compress_numel=0) as ours:
        ours.train(4)
        ours.optimizer.zero_grad()
        said = ours.updates.reducer.memory()
        added = bytes_held() - before
    return {
        "residuals of a shard": 0.9 * shards < said["residual_bytes"] <= shards,
        # Anchor, momentum and buffer.
        "nothing else": 2.9 * shards < added < 3 * shards + sum(said.values()) + (16 << 10),
    }


def counted(mesh: DeviceMesh) -> dict[str, bool]:
    """Only finite gradients that wait in the whole worker are those of an accumulation."""
    net = sharded(mesh["shard"])
    with training(net) as ours:
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        if mesh["shard"].get_local_rank() == 0:
            local(net.first.weight.grad).fill_(float("inf"))
        skipped = raised(ours.updates.step)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        accumulated = raised(ours.updates.step)
    return {"skipped": not skipped, "accumulated": "gradient accumulation" in accumulated}


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """Messages by what is wrong."""
    world, host = dist.get_world_size(), dist.get_rank() // 2
    flat = init_device_mesh("cpu", (world,))
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))

    def attempt(net: Any, **settings: Any) -> object:
        return local_updates(net, sgd(net.parameters()), **settings)

    def half() -> nn.Module:
        net = Net()
        for block in net.blocks:
            fully_shard(block, mesh=mesh["shard"])
        return net

    def across() -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LIGHTNING_DIST_HOSTNAME", f"host{host}")
            return attempt(sharded(mesh["replicate"]))

    def saved() -> object:
        with training(sharded(mesh["shard"])) as ours:
            return WorkerStates(ours.updates, [ours.optimizer])

    def factored() -> object:
        adafactor = {"outer_optimizer": lambda each: torch.optim.Adafactor(each)}
        net = fully_shard(nn.Linear(WIDTH, 34), mesh=mesh["shard"])
        with training(net, sync_every=1, **adafactor) as ours:
            ours.train(1)
            return ours.updates.state_dict()

    own = mesh["shard"]
    cases: Mapping[str, Callable[[], object]] = {
        "one worker": lambda: attempt(sharded(flat)),
        "across hosts": across,
        "native HSDP": lambda: attempt(sharded(mesh)),
        "half": lambda: attempt(half()),
        "offload": lambda: attempt(sharded(own, offload_policy=CPUOffloadPolicy(pin_memory=False))),
        "tensor parallel": lambda: attempt(sharded(cube["shard"], tensor=cube["tensor"], inner=36)),
        "rank groups": lambda: attempt(sharded(own), rank_groups=[[0, 1], [2, 3]]),
        "codec inside": lambda: attempt(sharded(own), codec={"intra": "bf16", "inter": "int8"}),
        "ddp steps": lambda: attempt(sharded(own), ddp_steps=3),
        "unequal settings": lambda: attempt(sharded(own), sync_every=4 + dist.get_rank()),
        "saved as one": saved,
        "factored state": factored,
    }
    return {name: raised(case) for name, case in cases.items()}


def main() -> None:
    _, *scenarios = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name in scenarios:
        facts = globals()[name](mesh)
        torch.save({"facts": facts}, FOLDER / f"{name}.{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
