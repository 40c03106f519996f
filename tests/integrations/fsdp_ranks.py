"""What ranks of a sharded model do: started by `test_fsdp.py`, leaves facts of every scenario.

torchrun fsdp_ranks.py FOLDER REPLICAS SHARDS SCENARIO...
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsdp_codecs
import torch
import torch.distributed as dist
from fsdp_models import (
    STEPS,
    WIDTH,
    Net,
    batches,
    bytes_held,
    counted_passes,
    local,
    raised,
    replicas_are_equal,
    same_in_replicas,
    sharded,
    train,
    weights,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from lightning_dist.codecs import warmup
from lightning_dist.integrations.torch.fsdp.attach import compress_fsdp

KERNELS = 16 << 10
"""Bytes that passes of kernels keep, whatever the model."""


def both(mesh: DeviceMesh, *, shard: DeviceMesh | None = None, **given: Any) -> bool:
    """Whether torch's HSDP and codec none end with the same bits."""
    how = {key: given.pop(key) for key in ("accumulate", "clip", "parts") if key in given}
    native = train(sharded(mesh, **given), ours=None, **how)
    net = sharded(shard or mesh["shard"], **given)
    ours = compress_fsdp(net, "none", mesh=mesh)
    try:
        found = train(net, ours=ours, **how)
    finally:
        ours.close()
    return all(map(torch.equal, native, found))


def equal_to_native(mesh: DeviceMesh) -> dict[str, bool]:
    """Codec none against torch's own HSDP, in many settings."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "plain steps, and accumulation": both(mesh, accumulate=True),
        "clipping, bf16 compute": both(mesh, clip=True, mp_policy=bf16),
        "traced blocks": both(mesh, compiled="aot_eager"),
        "activation checkpointing, frozen parts": both(mesh, checkpoints=True, frozen=True),
        "tied weights, resharded late": both(mesh, tied=True, reshard_after_forward=False),
    }


def tensor_parallel(_: DeviceMesh) -> dict[str, bool]:
    """Two replicas of shards whose matrices are split over two ranks."""
    shape = (2, dist.get_world_size() // 4, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tensor"))
    data, given = mesh["replicate", "shard"], {"tensor": mesh["tensor"], "inner": 36}
    found = {"equal to native": both(data, shard=mesh["shard"], accumulate=True, parts=2, **given)}
    flat = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    for codec in ("int4", "powersgd:rank=1"):
        net = sharded(mesh["shard"], **given)
        ours = compress_fsdp(net, codec, mesh=data, min_compress_numel=0)
        train(net, ours=ours, accumulate=True, parts=2)
        found[f"{codec}, replicas equal"] = replicas_are_equal(net, data)
        shared, residuals = [ours.state_dict()], ours.reducer.residuals
        found[f"{codec}, on rank 0"] = (shared[0] is not None) == (dist.get_rank() == 0)
        dist.broadcast_object_list(shared)
        saved, own = shared[0], mesh["replicate"].get_local_rank()
        parameters = dict(net.named_parameters())
        for name, rows in saved["residuals"].items():
            whole = placed_as(parameters[name], residuals[name])
            found[f"{codec}, whole {name}"] = torch.equal(rows[own], whole)
        before = {name: part.clone() for name, part in residuals.items()}
        ours.load_state_dict(saved)
        after, again = ours.reducer.residuals, [ours.state_dict()]
        ours.close()
        found[f"{codec}, parts of it"] = all(
            torch.equal(after[name], part) for name, part in before.items() if part.numel()
        )
        elsewhere = compress_fsdp(
            sharded(flat["shard"], inner=36), codec, mesh=flat, min_compress_numel=0
        )
        elsewhere.load_state_dict(saved)
        again.append(elsewhere.state_dict())
        elsewhere.close()
        for other in filter(None, again):
            rows = other["residuals"]
            found[f"{codec}, the same rows"] = all(
                torch.equal(rows[name], of) for name, of in saved["residuals"].items()
            )
        for name, of in saved.get("factors", {}).items() if again[0] else ():
            loaded = again[0]["factors"][name]
            found[f"factors of {name}"] = loaded.keys() == of.keys() and all(
                map(torch.equal, chain(*loaded.values()), chain(*of.values()))
            )
            found[f"parts of {name}"] = "blocks" not in name or len(of) == 2 * shape[1]
    return found


def placed_as(parameter: nn.Parameter, flat: Tensor) -> Tensor:
    """All of what each rank has a part of, as of ``parameter``."""
    assert isinstance(parameter, DTensor)
    part = flat.view(local(parameter).shape)
    at, how = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, at, how, shape=shape, stride=stride).full_tensor().flatten()


def compiled_blocks(mesh: DeviceMesh) -> dict[str, bool]:
    return {"compiled": both(mesh, compiled="inductor", accumulate=True)}


def compiled_kernels(mesh: DeviceMesh) -> dict[str, bool]:
    """Every pass over a shard with enough blocks is one compiled loop, with the bits of the eager
    one.
    """
    block, found = 16, []
    for wish in (False, True):
        eager, compiled = Counter[str](), Counter[str]()
        with counted_passes(eager, compiled):
            net = sharded(mesh["shard"])
            codec = f"int8:block_size={block}"
            ours = compress_fsdp(net, codec, mesh=mesh, min_compress_numel=0, compile_kernels=wish)
            eager.clear()  # of the comparison at set-up
            compiled.clear()
            ended = train(net, ours=ours)
            held = [ours.reducer.residuals[name] for name in sorted(ours.reducer.residuals)]
            found.append((ended + [each.clone() for each in held], eager.total(), compiled))
        ours.close()
    (before, without, nothing), (after, remain, compiled) = found
    large = sum(local(p).numel() // block >= 16 for p in net.parameters())
    passes = {"encode_and_commit", "decode_and_commit"}
    return {
        "equal": all(map(torch.equal, before, after)),
        "one loop a pass": compiled == dict.fromkeys(passes, large * STEPS),
        "instead of an eager one": without - remain == compiled.total() and not nothing,
    }


def memory(mesh: DeviceMesh) -> dict[str, bool]:
    """Between passes there are beside what torch's HSDP has only shards: residuals, payloads, and a
    flat copy of the gradients. A whole copy of the model would be as large as two.
    """
    before = bytes_held()
    native = sharded(mesh)
    train(native, ours=None, accumulate=True)
    of_native = bytes_held() - before
    net = sharded(mesh["shard"])
    ours = compress_fsdp(net, "int8", mesh=mesh, min_compress_numel=0)
    train(net, ours=ours, accumulate=True)
    shards = sum(local(p).nbytes for p in net.parameters())
    added, said = bytes_held() - before - 2 * of_native, ours.reducer.memory()
    sent: list[int] = []
    gather = dist.gather
    with patch.object(
        dist, "gather", lambda mine, *a, **k: sent.append(mine.nbytes) or gather(mine, *a, **k)
    ):
        ours.state_dict()
    ours.close()
    return memory_of_shards() | {
        "a shard of the residuals is sent": 0.9 * shards < sum(sent) < 1.2 * shards,
        "residuals of a shard": 0.9 * shards < said["residual_bytes"] <= shards,
        "payloads of a shard": 0 < said["buffer_bytes"] <= 2 * shards,
        "nothing else": added < shards + sum(said.values()) + KERNELS,
    }


def memory_of_shards() -> dict[str, bool]:
    """Between passes there are beside what FSDP has over all ranks only the errors, in 8 bits."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    before = bytes_held()
    native = sharded(mesh, inner=350)
    train(native, ours=None)
    of_native = bytes_held() - before
    net, codec = sharded(mesh, inner=350), "int8:block_size=16"
    given = {"error_feedback": True, "min_compress_numel": 0}
    ours = compress_fsdp(net, codec, mesh=mesh, parameters=codec, **given)
    train(net, ours=None)
    numel = sum(parameter.numel() for parameter in net.parameters())
    errors, added = ours.memory()["residual_bytes"], bytes_held() - before - 2 * of_native
    ours.close()
    return {
        "errors of all in 8 bits": numel < errors < 1.1 * numel * (1 + 2 / 16),
        "nothing but the errors": added < errors + KERNELS < errors + numel / 2,
    }


def resume(mesh: DeviceMesh) -> dict[str, bool]:
    """Weights of an interrupted run, against those of one that was not."""
    straight = sharded(mesh["shard"])
    ours = compress_fsdp(straight, "int4", mesh=mesh, min_compress_numel=0)
    train(straight, ours=ours)
    between, state = weights(straight), ours.state_dict()
    train(straight, ours=ours)
    ours.close()
    again = sharded(mesh["shard"])
    with torch.no_grad():
        for parameter, held in zip(again.parameters(), between, strict=True):
            local(parameter).copy_(held)
    ours = compress_fsdp(again, "int4", mesh=mesh, min_compress_numel=0)
    shared = [state]
    dist.broadcast_object_list(shared)
    ours.load_state_dict(shared[0])
    train(again, ours=ours)
    rows = {len(of) for of in shared[0]["residuals"].values()}
    whole = {n: p.numel() for n, p in again.named_parameters()}
    shapes = all(of.shape[1] == whole[n] for n, of in shared[0]["residuals"].items())
    ours.close()
    equal = all(map(torch.equal, weights(straight), weights(again)))
    return {"equal": equal, "a row for every replica": rows == {mesh.size(0)}, "whole": shapes}


def another_mesh(mesh: DeviceMesh) -> dict[str, bool]:
    """The residuals of two replicas of two shards, loaded by four replicas."""
    net = sharded(mesh["shard"])
    ours = compress_fsdp(net, "int4", mesh=mesh, min_compress_numel=0)
    train(net, ours=ours)
    shared = [ours.state_dict()]
    ours.close()
    dist.broadcast_object_list(shared)
    flat = init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
    )
    net = sharded(flat["shard"])
    ours = compress_fsdp(net, "int4", mesh=flat, min_compress_numel=0)
    ours.load_state_dict(shared[0])
    loaded = ours.state_dict()
    ours.load_state_dict(shared[0])
    train(net, ours=ours)
    ours.close()
    rows = shared[0]["residuals"]
    means = loaded is None or all(
        torch.equal(row, rows[name].mean(0))
        for name, of in loaded["residuals"].items()
        for row in of
    )
    return {"mean": means, "goes on": replicas_are_equal(net, flat)}


def flushed(mesh: DeviceMesh) -> dict[str, bool]:
    """A codec that keeps no residual after one that does: what is owed is sent, once."""
    net, exact = sharded(mesh["shard"]), sharded(mesh)
    policy = warmup({0: "int4", 3: "none"})
    ours = compress_fsdp(net, policy, mesh=mesh, min_compress_numel=0)
    applied, wanted = ([torch.zeros_like(w) for w in weights(each)] for each in (net, exact))
    for first, _ in batches(5):
        for model, sums in ((net, applied), (exact, wanted)):
            model.zero_grad()
            model(first).square().mean().backward()
            for parameter, total in zip(model.parameters(), sums, strict=True):
                total += local(parameter.grad)
    close = [
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(applied, wanted, strict=True)
    ]
    freed = not ours.reducer.residuals
    ours.close()
    return {"all is sent": all(close), "freed": freed}


def grad_scaler(mesh: DeviceMesh) -> dict[str, bool]:
    """A GradScaler changes no bits, and a step that it skips leaves no trace."""
    found = []
    for enabled in (False, True):
        net = sharded(mesh["shard"])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        settings = {"min_compress_numel": 0, "grad_scaler": scaler}
        ours = compress_fsdp(net, "int4", mesh=mesh, **settings)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step, (first, _) in enumerate(batches()):
            for bad in (True, False) if enabled and step == 1 else (False,):
                optimizer.zero_grad()
                factor = torch.inf if bad and dist.get_rank() == 0 else 1.0
                scaler.scale(net(first * factor).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        found.append([*weights(net), *ours.reducer.residuals.values()])
        ours.close()
    return {
        "skipped once": scaler.get_scale() == 512.0,
        "equal": all(map(torch.equal, *found)),
    }


def drift(mesh: DeviceMesh) -> dict[str, bool]:
    """The factors of one replica are a little different, as another LAPACK would have them."""
    net = sharded(mesh["shard"])
    ours = compress_fsdp(net, "powersgd:rank=2", mesh=mesh, min_compress_numel=0)
    with patch("lightning_dist.reducer.pipeline._COMPARED_EVERY", STEPS):
        equal = raised(lambda: train(net, ours=ours))
        for factors in ours.reducer.state.factors.values():
            for factor in factors:
                factor.mul_(1 + 1e-3 * mesh["replicate"].get_local_rank())
        unequal = raised(lambda: train(net, ours=ours))
    ours.close()
    return {"equal": not equal, "told": "drifted apart" in unequal}


def interrupted(mesh: DeviceMesh) -> dict[str, bool]:
    """A backward pass that an exception ends, on all ranks; then training."""
    net = sharded(mesh["shard"])
    ours = compress_fsdp(net, "int8", mesh=mesh, min_compress_numel=0)
    fails = True

    def hook(_: Tensor) -> None:
        if fails:
            raise KeyError("planted")

    (batch,) = batches(1)
    inner = net.blocks[0].register_forward_pre_hook(
        lambda _, args: args[0].register_hook(hook) and None
    )
    try:
        net(batch[0]).square().mean().backward()
        raised = False
    except KeyError:
        raised = True
    fails = False
    inner.remove()
    net.reset_iter_state()  # FSDP's own
    train(net, ours=ours)
    ours.close()
    return {"raised": raised, "goes on": replicas_are_equal(net, mesh)}


def accumulation(mesh: DeviceMesh) -> dict[str, bool]:
    """Gradients of `.grad` are averaged with those of the last micro-batch, or an error says so."""
    net = sharded(mesh["shard"])
    ours = compress_fsdp(net, "none", mesh=mesh)
    (first, second), *_ = batches()

    def backward(x: Tensor, of: Callable[[Tensor], Tensor] = net) -> None:
        of(x).square().mean().backward()

    with ours.no_sync():
        backward(first)
    for block in net.blocks:
        block[0].weight.grad = None  # as by the zero_grad of one of two optimizers
    started: list[int] = []
    start, finish = ours.reducer.start, ours._finish
    with (
        patch.object(
            ours.reducer, "start", lambda *a, **k: started.append(k["key"]) or start(*a, **k)
        ),
        patch.object(ours, "_finish", lambda: started.append(-1) or finish()),
    ):
        backward(second)
    averaged = same_in_replicas([local(p.grad) for p in net.parameters()], mesh)
    net.zero_grad()
    with ours.no_sync():
        backward(first)
    left_out = raised(lambda: backward(second, net.blocks[0]))
    net.zero_grad()
    net.reset_iter_state()
    backward(first)
    goes_on = same_in_replicas([local(p.grad) for p in net.parameters()], mesh)
    net.set_reduce_scatter_unused_params(True)
    with ours.no_sync():
        backward(first)
    unused = raised(lambda: backward(second, net.blocks[0]))
    zeros = same_in_replicas([local(p.grad) for p in net.parameters()], mesh)
    hook = net.head.weight.register_post_accumulate_grad_hook(lambda _: None)
    hooked = raised(lambda: backward(second))
    hook.remove()
    ours.close()
    return {
        "averaged": averaged,
        "during the backward pass": started == [3, 2, 1, 0, -1],
        "left out": "set_reduce_scatter_unused_params(True)" in left_out,
        "goes on": goes_on,
        "zeros for the unused": zeros and not unused,
        "hooked": "step the optimizer after backward()" in hooked,
    }


class WithoutAccelerator(FullyShardedDataParallel):
    """FSDP1, which is made on accelerators alone."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


def on_two_meshes(mesh: DeviceMesh) -> nn.Module:
    """Its weight is sharded over one dimension, its bias over the other."""
    other = ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0))
    net = nn.Linear(WIDTH, WIDTH)
    fully_shard(
        net,
        mesh=mesh["shard"],
        shard_placement_fn=lambda parameter: other if parameter.dim() == 1 else None,
    )
    return net


def summing(mesh: DeviceMesh) -> nn.Module:
    """FSDP divides its gradients after they are summed."""
    net = sharded(mesh["shard"])
    net.set_force_sum_reduction_for_comms(True)
    return net


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """Messages by what is wrong."""
    cases: dict[str, Callable[[], object]] = {
        "not sharded": lambda: compress_fsdp(Net(), mesh=mesh),
        "one dimension": lambda: compress_fsdp(sharded(mesh["shard"]), mesh=mesh["shard"]),
        "native HSDP": lambda: compress_fsdp(sharded(mesh), mesh=mesh),
        "offload": lambda: compress_fsdp(
            sharded(mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False)), mesh=mesh
        ),
        "reduce dtype": lambda: compress_fsdp(
            sharded(mesh["shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
            mesh=mesh,
        ),
        "fp16 reduction": lambda: compress_fsdp(
            sharded(mesh["shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)),
            mesh=mesh,
        ),
        "sums": lambda: compress_fsdp(summing(mesh), mesh=mesh),
        "fp16": lambda: compress_fsdp(sharded(mesh["shard"], dtype=torch.float16), mesh=mesh),
        "FSDP1": lambda: compress_fsdp(WithoutAccelerator(), mesh=mesh),
        "placement": lambda: compress_fsdp(
            fully_shard(
                nn.Linear(4, 4, bias=False),
                mesh=mesh["shard"],
                shard_placement_fn=lambda _: Shard(1),
            ),
            mesh=mesh,
        ),
        "several groups": lambda: compress_fsdp(on_two_meshes(mesh), mesh=mesh),
        "one replica": lambda: compress_fsdp(
            sharded(init_device_mesh("cpu", (dist.get_world_size(),))),
            mesh=init_device_mesh("cpu", (1, dist.get_world_size())),
        ),
        "another mesh": lambda: compress_fsdp(
            sharded(init_device_mesh("cpu", (dist.get_world_size(),))), mesh=mesh
        ),
        "unequal settings": lambda: compress_fsdp(
            sharded(mesh["shard"]), "int8" if dist.get_rank() else "int4", mesh=mesh
        ),
    }
    return {name: raised(case) for name, case in cases.items()}


def main() -> None:
    folder, replicas, shards, *scenarios = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = (int(replicas), int(shards))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    scenarios_of = {**vars(fsdp_codecs), **globals()}
    for name in scenarios:
        facts = scenarios_of[name](mesh)
        path = Path(folder) / f"{name}.{replicas}x{shards}.{dist.get_rank()}.pt"
        torch.save({"facts": facts}, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
