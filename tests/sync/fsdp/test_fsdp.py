"""Sharded models (FSDP2) whose shards cross between replicas compressed, on real processes."""

import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    STEPS,
    WIDTH,
    Net,
    batches,
    bytes_held,
    compressed,
    counted_passes,
    local,
    mesh_of,
    replicas_are_equal,
    same_in_replicas,
    sharded,
    train,
    train_in_phases,
    weights,
)
from replicas import of_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from lightning_dist import OneBitAdam
from lightning_dist.sync.base import Environment
from lightning_dist.sync.fsdp.replicas import ShardedGradients, compress_fsdp

pytestmark = [pytest.mark.slow, pytest.mark.on_ranks(4)]
IS_NEW = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 is reset from torch 2.13 on"
)
KERNELS = 16 << 10
"""Bytes that passes of kernels keep, whatever the model."""


def require_bits_of_hsdp(
    mesh: DeviceMesh, *, shard: DeviceMesh | None = None, **given: Any
) -> None:
    """torch's HSDP and codec none end with the same bits."""
    how = {key: given.pop(key) for key in ("accumulate", "clip", "parts") if key in given}
    native = train(sharded(mesh, **given), ours=None, **how)
    net = sharded(shard or mesh["shard"], **given)
    with compressed(mesh, "none", net=net) as (_, ours):
        assert all(map(torch.equal, native, train(net, ours=ours, **how)))


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHAPES = [
    (2, 2),
    pytest.param(3, 1, marks=[pytest.mark.on_ranks(3), pytest.mark.exhaustive]),
    pytest.param(2, 3, marks=[pytest.mark.on_ranks(6), pytest.mark.exhaustive]),
]


@pytest.mark.parametrize(("replicas", "shards"), SHAPES)
@pytest.mark.parametrize(
    "how",
    [
        {"accumulate": True},
        {"clip": True, "mp_policy": BF16},
        {"compiled": "aot_eager"},
        {"checkpoints": True, "frozen": True},
        {"tied": True, "reshard_after_forward": False},
        pytest.param(
            {"compiled": "inductor", "accumulate": True},
            marks=[pytest.mark.exhaustive, NEEDS_COMPILER],
        ),
    ],
    ids=", ".join,
)
def test_uncompressed_it_has_the_bits_of_torch(
    replicas: int, shards: int, how: dict[str, Any]
) -> None:
    require_bits_of_hsdp(mesh_of(replicas, shards), **how)


@pytest.mark.parametrize("codec", ["int4", "powersgd:rank=1"])
@pytest.mark.parametrize(
    "ranks", [4, pytest.param(8, marks=[pytest.mark.on_ranks(8), pytest.mark.exhaustive])]
)
def test_tensor_parallel_shards(ranks: int, codec: str) -> None:
    """Two replicas of shards whose matrices are split over two ranks."""
    shape = (2, ranks // 4, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tensor"))
    data, given = mesh["replicate", "shard"], {"tensor": mesh["tensor"], "inner": 36}
    require_bits_of_hsdp(data, shard=mesh["shard"], accumulate=True, parts=2, **given)
    with compressed(data, codec, net=sharded(mesh["shard"], **given)) as (net, ours):
        train(net, ours=ours, accumulate=True, parts=2)
        assert replicas_are_equal(net, data)
        saved, *others = of_all(ours.state_dict())
        assert others == [None] * (ranks - 1)
        residuals, own = ours.reducer.residuals, mesh["replicate"].get_local_rank()
        parameters = dict(net.named_parameters())
        for name, rows in saved["residuals"].items():
            assert torch.equal(rows[own], placed_as(parameters[name], residuals[name])), name
        before = {name: part.clone() for name, part in residuals.items()}
        ours.load_state_dict(saved)
        after, again = ours.reducer.residuals, [ours.state_dict()]
    for name, part in before.items():
        assert part.numel() == 0 or torch.equal(after[name], part), name
    flat = mesh_of(2, ranks // 2)
    with compressed(flat, codec, net=sharded(flat["shard"], inner=36)) as (_, elsewhere):
        elsewhere.load_state_dict(saved)
        again.append(elsewhere.state_dict())
    for other in filter(None, again):
        for name, rows in saved["residuals"].items():
            assert torch.equal(other["residuals"][name], rows), name
    for name, of in saved.get("factors", {}).items() if again[0] else ():
        loaded = again[0]["factors"][name]
        assert loaded.keys() == of.keys()
        assert all(map(torch.equal, chain(*loaded.values()), chain(*of.values()))), name
        assert "blocks" not in name or len(of) == 2 * shape[1], "parts"


def placed_as(parameter: nn.Parameter, flat: Tensor) -> Tensor:
    """All of what each rank has a part of, as of ``parameter``."""
    assert isinstance(parameter, DTensor)
    part = flat.view(local(parameter).shape)
    at, how = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, at, how, shape=shape, stride=stride).full_tensor().flatten()


@pytest.mark.exhaustive
@NEEDS_COMPILER
@pytest.mark.parametrize("replicas", [2, 1])
def test_every_pass_over_a_shard_of_enough_blocks_is_one_compiled_loop(replicas: int) -> None:
    """With the bits of the eager one; those of errors where all ranks have the shards of one."""
    mesh, found = mesh_of(replicas, 4 // replicas), []
    block, codec = 16, "int8:block_size=16"
    given = {} if replicas > 1 else {"parameters": codec, "error_feedback": True}
    over = mesh if replicas > 1 else mesh["shard"]
    for wish in (False, True):
        eager, compiled = Counter[str](), Counter[str]()
        net = sharded(mesh["shard"])
        with (
            counted_passes(eager, compiled),
            compressed(over, codec, net=net, compile_kernels=wish, **given) as (_, ours),
        ):
            eager.clear()  # of the comparison at set-up
            compiled.clear()
            ended = train(net, ours=None)
            found.append((ended + residuals_of(ours), eager.total(), compiled))
    (before, without, nothing), (after, remain, compiled) = found
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))
    assert without - remain == compiled.total()
    assert not nothing
    large = sum(local(p).numel() // block >= 16 for p in net.parameters())
    passes = ["encode_and_commit", "decode_and_commit"]
    if replicas > 1:
        assert compiled == dict.fromkeys(passes, large * STEPS)
    else:
        assert set(compiled) == {"encode", *passes}


def residuals_of(ours: Any) -> list[Tensor]:
    if hasattr(ours, "reducer"):
        return [ours.reducer.residuals[name].clone() for name in sorted(ours.reducer.residuals)]
    parts = [part for each in ours._reductions.values() for part in each.errors]
    return [of.clone() for part in parts for of in part]


def test_memory_between_passes_is_of_shards_only() -> None:
    """Beside what torch's HSDP has: residuals, payloads, and a flat copy of the gradients. A whole
    copy of the model would be as large as two.
    """
    mesh, before = mesh_of(2, 2), bytes_held()
    native = sharded(mesh)
    train(native, ours=None, accumulate=True)
    of_native = bytes_held() - before
    with compressed(mesh, "int8") as (net, ours):
        train(net, ours=ours, accumulate=True)
        shards = sum(local(p).nbytes for p in net.parameters())
        added, said = bytes_held() - before - 2 * of_native, ours.reducer.memory()
        with patch.object(dist, "gather", wraps=dist.gather) as gather:
            ours.state_dict()
    sent = [call.args[0].nbytes for call in gather.mock_calls]
    assert 0.9 * shards < sum(sent) < 1.2 * shards
    assert 0.9 * shards < said["residual_bytes"] <= shards
    assert 0 < said["buffer_bytes"] <= 2 * shards
    assert added < shards + sum(said.values()) + KERNELS


def test_errors_of_parameters_take_8_bits() -> None:
    """Between passes there are beside what FSDP has over all ranks only the errors."""
    mesh = init_device_mesh("cpu", (4,))
    before = bytes_held()
    native = sharded(mesh, inner=350)
    train(native, ours=None)
    of_native = bytes_held() - before
    net, codec = sharded(mesh, inner=350), "int8:block_size=16"
    given = {"parameters": codec, "error_feedback": True}
    with compressed(mesh, codec, net=net, **given) as (_, ours):
        train(net, ours=None)
        numel = sum(parameter.numel() for parameter in net.parameters())
        errors, added = ours.memory()["residual_bytes"], bytes_held() - before - 2 * of_native
    assert numel < errors < 1.1 * numel * (1 + 2 / 16)
    assert added < errors + KERNELS < errors + numel / 2


def test_residuals_of_two_replicas_of_two_shards_go_on_in_four_replicas() -> None:
    with compressed(mesh_of(2, 2), "int4") as (net, ours):
        train(net, ours=ours)
        saved, *_ = of_all(ours.state_dict())
    flat = mesh_of(4, 1)
    with compressed(flat, "int4") as (net, ours):
        ours.load_state_dict(saved)
        loaded = ours.state_dict()
        ours.load_state_dict(saved)
        train(net, ours=ours)
    for name, of in loaded["residuals"].items() if loaded else ():
        mean = saved["residuals"][name].mean(0)
        assert all(torch.equal(row, mean) for row in of)
    assert replicas_are_equal(net, flat)


def test_a_grad_scaler_changes_no_bits_and_a_skipped_step_leaves_no_trace() -> None:
    mesh, found = mesh_of(2, 2), []
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        with compressed(mesh, "int4", grad_scaler=scaler) as (net, ours):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for step, (first, _) in enumerate(batches()):
                for bad in (True, False) if enabled and step == 1 else (False,):
                    optimizer.zero_grad()
                    factor = torch.inf if bad and dist.get_rank() == 0 else 1.0
                    scaler.scale(net(first * factor).square().mean()).backward()
                    scaler.step(optimizer)
                    scaler.update()
            found.append([*weights(net), *ours.reducer.residuals.values()])
    assert scaler.get_scale() == 512.0, "skipped once"
    assert all(map(torch.equal, *found))


def test_factors_that_drift_apart_are_told() -> None:
    """Those of one replica are a little different, as another LAPACK would have them."""
    mesh = mesh_of(2, 2)
    with (
        patch("lightning_dist.reducer.pipeline._COMPARED_EVERY", STEPS),
        compressed(mesh, "powersgd:rank=2") as (net, ours),
    ):
        train(net, ours=ours)
        for factors in ours.reducer.state.factors.values():
            for factor in factors[:2]:
                factor.mul_(1 + 1e-3 * mesh["replicate"].get_local_rank())
        with pytest.raises(RuntimeError, match="drifted apart"):
            train(net, ours=ours)


@IS_NEW
def test_training_goes_on_after_a_backward_pass_that_an_exception_ends() -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("planted")

    mesh, ((batch, _),) = mesh_of(2, 2), batches(1)
    with compressed(mesh, "int8") as (net, ours):
        inner = net.blocks[0].register_forward_pre_hook(
            lambda _, args: args[0].register_hook(fail) and None
        )
        with pytest.raises(KeyError, match="planted"):
            net(batch).square().mean().backward()
        inner.remove()
        net.reset_iter_state()  # FSDP's own
        train(net, ours=ours)
    assert replicas_are_equal(net, mesh)


@IS_NEW
def test_gradients_of_other_micro_batches_are_averaged_too_or_an_error_says_so() -> None:
    mesh = mesh_of(2, 2)
    net = sharded(mesh["shard"])
    ours = compress_fsdp(net, "none", mesh=mesh)
    (first, second), *_ = batches()

    def backward(x: Tensor, of: Callable[[Tensor], Tensor] = net) -> None:
        of(x).square().mean().backward()

    def averaged() -> bool:
        return same_in_replicas([local(p.grad) for p in net.parameters()], mesh)

    with ours.no_sync():
        backward(first)
    for block in net.blocks:
        block[0].weight.grad = None  # as by the zero_grad of one of two optimizers
    started: list[int] = []
    start, finish = ours.reducer.start, ours.reducer.finish
    with (
        patch.object(
            ours.reducer, "start", lambda *a, **k: started.append(k["key"]) or start(*a, **k)
        ),
        patch.object(ours.reducer, "finish", lambda: started.append(-1) or finish()),
    ):
        backward(second)
    assert averaged()
    assert started == [3, 2, 1, 0, -1], "during the backward pass"
    net.zero_grad()
    with ours.no_sync():
        backward(first)
    with pytest.raises(RuntimeError, match=r"set_reduce_scatter_unused_params\(True\)"):
        backward(second, net.blocks[0])
    net.zero_grad()
    net.reset_iter_state()
    backward(first)
    assert averaged(), "it goes on"
    net.set_reduce_scatter_unused_params(True)
    with ours.no_sync():
        backward(first)
    backward(second, net.blocks[0])
    assert averaged(), "zeros for the unused"
    hook = net.head.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match=r"step the optimizer after backward\(\)"):
        backward(second)
    hook.remove()
    ours.close()


class Parts(nn.Module):
    """Two modules one after the other, which are sharded and not the whole.

    Args:
        blocks: shard blocks of each alone.
        reentrant: recompute each in a backward pass of its own.
    """

    def __init__(self, mesh: DeviceMesh, *, blocks: bool, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(WIDTH, 35), nn.Linear(35, WIDTH)) for _ in range(2))
        self.parts, self._reentrant = nn.ModuleList(layers), reentrant
        for part in self.parts:
            for module in part if blocks else [part]:
                fully_shard(module, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=True) if self._reentrant else part(x)
        return x


@pytest.mark.parametrize(
    "how",
    [
        {"blocks": False, "reentrant": False},
        {"blocks": True, "reentrant": False},
        {"blocks": False, "reentrant": True},
        {"blocks": True, "reentrant": True},
    ],
    ids=["two roots", "no root", "roots, reentrant", "no root, reentrant"],
)
def test_a_backward_pass_is_one_step(how: dict[str, bool]) -> None:
    """Whatever passes are within it, and with whatever gradients are reduced at its end."""
    mesh, counted = mesh_of(2, 2), list[int]()

    def trained(net: nn.Module, ours: Any = None) -> list[Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for first, second in batches():
            optimizer.zero_grad()
            with nullcontext() if ours is None else ours.no_sync():
                set_all_reduce(net, enabled=ours is not None)
                net(first.requires_grad_(how["reentrant"])).square().mean().backward()
                set_all_reduce(net, enabled=True)
            net(second.requires_grad_(how["reentrant"])).square().mean().backward()
            optimizer.step()
            counted.append(0 if ours is None else ours.comm_stats()["steps"])
        return weights(net)

    native = trained(Parts(mesh, **how))
    with compressed(mesh, "none", net=Parts(mesh["shard"], **how)) as (net, ours):
        assert all(map(torch.equal, native, trained(net, ours)))
    every = init_device_mesh("cpu", (4,))
    net = Parts(every, **how)
    with compressed(every, "none", net=net, parameters="none") as (_, shards):
        trained(net, shards)
    assert counted == [0, 0, 0, 1, 2, 3, 2, 4, 6]


@pytest.mark.parametrize("given", [{}, {"parameters": "none"}], ids=["replicas", "shards"])
def test_parameters_that_a_validation_has_gathered(given: dict[str, Any]) -> None:
    """Compressing a model after it, and saving."""
    mesh = init_device_mesh("cpu", (4,)) if given else mesh_of(2, 2)
    found = []
    for validates in (False, True):
        net = sharded(mesh if given else mesh["shard"])

        def validate(net: nn.Module = net, validates: bool = validates) -> None:
            if validates:
                with torch.no_grad():
                    net(torch.ones(2, WIDTH))

        validate()
        with compressed(mesh, "none" if given else "int8", net=net, **given) as (_, ours):
            train(net, ours=ours, after_step=validate)
            saved, *_ = of_all(ours.state_dict())
            validate()
            ours.load_state_dict(saved)
            held = [local(each).clone() for each in net.state_dict().values()]
            found.append([*held, *saved.get("residuals", {}).values()])
    assert all(map(torch.equal, *found))


def test_momenta_of_shards_are_refused_by_name() -> None:
    mesh = mesh_of(2, 2)
    with compressed(mesh, "sign") as (net, _):
        optimizer = OneBitAdam(net.parameters(), freeze_step=2)
        with pytest.raises(ValueError, match=r"here they are sharded; use torch\.optim\.AdamW"):
            optimizer.step()


def test_a_state_of_the_other_kind_is_dropped_and_said() -> None:
    """Between replicas, or over all ranks: neither has residuals of the other."""
    mesh, every = mesh_of(2, 2), init_device_mesh("cpu", (4,))
    said: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("lightning_dist")
    logger.addHandler(watch)
    try:
        with compressed(mesh, "int8") as (net, ours):
            train(net, ours=ours)
            of_replicas = of_all(ours.state_dict())[0]
            ours.load_state_dict({"steps": {"weight": 3}})
            assert ours.reducer.step == 0
            assert not any(each.any() for each in ours.reducer.residuals.values())
        of_shards = compress_fsdp(sharded(every), "qsgd", mesh=every, parameters="int8")
        of_shards.load_state_dict(of_replicas)
        of_shards.close()
    finally:
        logger.removeHandler(watch)
    dropped = [each for each in said if "compressed in the other way" in each]
    assert len(dropped) == (2 if dist.get_rank() == 0 else 0)


def test_the_next_fit_goes_on_with_the_same_model_only() -> None:
    mesh = mesh_of(2, 2)
    with compressed(mesh, "int8") as (net, before):
        train(net, ours=before)
    owed = {name: each.clone() for name, each in before.reducer.residuals.items()}
    for model, steps in ((net, STEPS), (sharded(mesh["shard"]), 0)):
        environment = Environment(mesh=mesh, before=before)
        after = ShardedGradients.attach(model, before.settings, environment)
        kept = after.reducer.residuals
        assert after.reducer.step == steps
        same = (torch.equal(kept[name], owed[name]) for name in owed if owed[name].any())
        assert all(same) if steps else not any(each.any() for each in kept.values())
        after.close()


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_layers_that_are_unfrozen_and_frozen_again(codec: str) -> None:
    """A part of a group, and a whole one: what torch's HSDP has at every step, uncompressed."""
    mesh = mesh_of(2, 2)

    with compressed(mesh, codec, net=sharded(mesh["shard"])) as (net, ours):
        steps = train_in_phases(net, ours=ours)
        assert replicas_are_equal(net, mesh)
        assert ours.reducer.step == 8
        assert codec == "none" or ours.reducer.residuals["first.weight"].any()
    if codec == "none":
        for own, native in zip(steps, train_in_phases(sharded(mesh), ours=None), strict=True):
            assert all(map(torch.equal, own, native))


def set_all_reduce(net: nn.Module, *, enabled: bool) -> None:
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(enabled)


class WithoutAccelerator(FullyShardedDataParallel):
    """FSDP1, which is made on accelerators alone."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


def on_two_meshes(mesh: DeviceMesh) -> nn.Module:
    """Its weight is sharded over one dimension, its bias over the other."""
    over = _fsdp_common.FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0)
    other = _fsdp_common.ShardPlacementResult(Shard(0), over)
    return fully_shard(
        nn.Linear(WIDTH, WIDTH),
        mesh=mesh["shard"],
        shard_placement_fn=lambda parameter: other if parameter.dim() == 1 else None,
    )


def summing(mesh: DeviceMesh) -> nn.Module:
    """FSDP divides its gradients after they are summed."""
    net = sharded(mesh["shard"])
    net.set_force_sum_reduction_for_comms(True)
    return net


def test_what_cannot_work_is_refused() -> None:
    mesh = mesh_of(2, 2)
    whole, shard = init_device_mesh("cpu", (4,)), mesh["shard"]
    columns = {"mesh": shard, "shard_placement_fn": lambda _: Shard(1)}
    bf16, fp16 = (MixedPrecisionPolicy(reduce_dtype=each) for each in (torch.bfloat16, torch.half))
    offload = CPUOffloadPolicy(pin_memory=False)
    outside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(outside[0], mesh=shard)
    cases: list[tuple[str, Callable[[], nn.Module], DeviceMesh]] = [
        ("got 1.weight, 1.bias outside of it", lambda: outside, mesh),
        ("call fully_shard", Net, mesh),
        ("two dimensions", lambda: sharded(shard), shard),
        ("call it with mesh", lambda: sharded(mesh), mesh),
        ("CPUOffloadPolicy", lambda: sharded(shard, offload_policy=offload), mesh),
        ("reduce_dtype", lambda: sharded(shard, mp_policy=bf16), mesh),
        (
            "got reduce_dtype torch.float16 for parameters in torch.float32",
            lambda: sharded(shard, mp_policy=fp16),
            mesh,
        ),
        ("after set_force_sum_reduction_for_comms(True)", lambda: summing(mesh), mesh),
        (
            "keep parameters in bfloat16 or float32",
            lambda: sharded(shard, dtype=torch.float16),
            mesh,
        ),
        ("call fully_shard on the blocks", WithoutAccelerator, mesh),
        (
            "leave shard_placement_fn out",
            lambda: fully_shard(nn.Linear(4, 4, bias=False), **columns),
            mesh,
        ),
        *(
            [("parameters of a module in one group", lambda: on_two_meshes(mesh), mesh)]
            if hasattr(_fsdp_common, "ShardPlacementResult")
            else []
        ),
        ("several replicas", lambda: sharded(whole), init_device_mesh("cpu", (1, 4))),
        ("one dimension of mesh", lambda: sharded(whole), mesh),
    ]
    for says, make, over in cases:
        with pytest.raises(ValueError, match=re.escape(says)):
            compress_fsdp(make(), mesh=over)
    unequal = "int8" if dist.get_rank() else "int4"
    with pytest.raises(ValueError, match="codec"):
        compress_fsdp(sharded(shard), unequal, mesh=mesh)
    net = sharded(shard)
    first = compress_fsdp(net, "int8", mesh=mesh)
    for again in (None, "int8"):
        with pytest.raises(ValueError, match="compress_fsdp was called on it before; close"):
            compress_fsdp(net, "qsgd", mesh=mesh, parameters=again)
    first.close()
    compress_fsdp(net, "int8", mesh=mesh).close()
