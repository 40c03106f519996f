"""Models sharded over all ranks, whose own collectives are quantised, on real processes."""

import math
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    WIDTH,
    Net,
    compressed,
    load_weights,
    require_same_debt,
    sharded,
    train,
    train_in_phases,
    weights,
)
from replicas import of_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from worlds import ALL_GATHER

from lightning_dist import CommProfiler
from lightning_dist.measurement import CodecCost
from lightning_dist.profiling.run import read_run
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import predict
from lightning_dist.profiling.whatif.scenarios import scenarios_of
from lightning_dist.sync.fsdp import shards
from lightning_dist.sync.fsdp.private import collectives_of, parameter_groups_of
from lightning_dist.sync.fsdp.replicas import compress_fsdp
from lightning_dist.sync.fsdp.shards import QuantisedCollective

pytestmark = pytest.mark.on_ranks(2)
FOUR = pytest.param(4, marks=[pytest.mark.on_ranks(4), pytest.mark.exhaustive])
RANKS = pytest.mark.parametrize("ranks", [2, FOUR], scope="module")
"""In turn: all tests of two ranks, then those of four."""
STEPS = 6
STEPS_OF_TRAIN = 3
BLOCK = 64
RATE = 0.1
INT8 = f"int8:block_size={BLOCK}"
"""Of parameters, and of gradients with error feedback."""
RANDOM: dict[str, Any] = {"codec": "qsgd:bits=8,block_size=64", "min_compress_numel": 0}
FED_BACK: dict[str, Any] = {"codec": INT8, "error_feedback": True, "min_compress_numel": 0}
GATHERED_AND_REDUCED = 2 * ["all_gather"] + ["all_gather", "all_to_all", "all_to_all"]
"""Forward of the outermost module and the one in it; backward of that; gradients of both."""


class Small(nn.Module):
    """Odd sizes, and a parameter of which some ranks have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(21, 43), nn.Linear(43, 19)
        self.last = nn.Linear(19, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small().double()


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(8, 21, generator=generator, dtype=torch.float64)
    return x, x[:, :3].sum(1, keepdim=True) / 2


def loss_of(net: nn.Module, rank: int, step: int) -> Tensor:
    x, y = data(rank, step)
    return (net(x) - y).square().mean()


def rounded(rows: Tensor) -> Tensor:
    """``rows (R, n)`` in int8 with a scale a block, in float64: the definition, written anew."""
    padded = nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = padded.abs().amax(-1, keepdim=True).float()
    scale = ((largest * (1.008 / 127)).view(torch.int32) >> 16 << 16).view(torch.float32)
    codes = (padded * (1 / scale.clamp_min(2.0**-126))).round()
    return (codes * scale.double()).flatten(1)[:, : rows.shape[1]]


def as_rows(tensor: Tensor, ranks: int) -> Tensor:
    """The shards of ``tensor``, padded to the largest: ``(ranks, n)``."""
    per_rank = -(-tensor.shape[0] // ranks)
    flat = tensor.reshape(tensor.shape[0], -1)
    flat = nn.functional.pad(flat, (0, 0, 0, ranks * per_rank - len(flat)))
    return flat.reshape(ranks, -1)


def from_rows(rows: Tensor, like: Tensor) -> Tensor:
    return rows.flatten()[: like.numel()].view_as(like)


def twin(ranks: int) -> list[Tensor]:
    """Weights after training of all ranks in one process, unsharded, without our package."""
    net = small()
    exact = [parameter.detach().clone() for parameter in net.parameters()]
    sizes = [as_rows(w, ranks).shape[1] for w in exact]
    compressed = [-(-n // BLOCK) * (BLOCK + 2) < 8 * n for n in sizes]  # less than in float64
    errors = [[torch.zeros_like(as_rows(w, ranks)) for w in exact] for _ in range(ranks)]
    for step in range(STEPS):
        with torch.no_grad():
            for parameter, weight, is_rounded in zip(
                net.parameters(), exact, compressed, strict=True
            ):
                rows = as_rows(weight, ranks)
                parameter.copy_(from_rows(rounded(rows) if is_rounded else rows, weight))
        sums = [torch.zeros_like(as_rows(w, ranks)) for w in exact]
        for rank in range(ranks):
            net.zero_grad()
            loss_of(net, rank, step).backward()
            for i, parameter in enumerate(net.parameters()):
                assert parameter.grad is not None
                rows = as_rows(parameter.grad, ranks)
                if compressed[i]:
                    wanted = rows + errors[rank][i]
                    rows = rounded(wanted)
                    errors[rank][i] = rounded(wanted - rows)
                sums[i] += rows / ranks
        for weight, total in zip(exact, sums, strict=True):
            weight -= RATE * from_rows(total, weight)
    return exact


def fit(net: nn.Module, *, first: int = 0, steps: int = STEPS) -> list[float]:
    """Losses on this rank's data."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=RATE), []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(net, dist.get_rank(), step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def shard(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(net.second, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def compressed_small(mesh: DeviceMesh, *, seed: int = 0, **settings: Any) -> Any:
    return compressed(mesh, net=shard(small(seed), mesh), parameters=INT8, **settings)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), FOUR])
def test_it_is_its_definition(ranks: int) -> None:
    """Against a twin in one process, in float64: what is left is the rounding of float64."""
    mesh = init_device_mesh("cpu", (ranks,))
    with compressed_small(mesh, **FED_BACK) as (net, _):
        fit(net)
    found = [parameter.full_tensor() for parameter in net.parameters()]
    for name, end, expected, start in zip(
        dict(net.named_parameters()), found, twin(ranks), small().parameters(), strict=True
    ):
        assert (end - expected).abs().max() < 1e-12, name
        assert (end - start).abs().max() > 1e-3, name


@RANKS
def test_bytes_that_are_given_to_the_process_group_are_those_that_it_says(ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    given = {ALL_GATHER: 0, "all_to_all_single": 0}
    plain = {name: getattr(dist, name) for name in given}

    def counting(name: str) -> Callable[..., Any]:
        def call(output: Tensor, own: Tensor, *args: Any, **kwargs: Any) -> Any:
            assert own.dtype == torch.uint8
            given[name] += own.nbytes
            return plain[name](output, own, *args, **kwargs)

        return call

    net = sharded(mesh)
    ours = compress_fsdp(net, mesh=mesh, parameters=INT8, **RANDOM)
    with patch.multiple(dist, **{name: counting(name) for name in given}):
        train(net, ours=None)
        with torch.no_grad():
            net(torch.ones(1, WIDTH))
        validated = ours.comm_stats()
        for _ in range(2):
            net(torch.ones(1, WIDTH))
        net(torch.ones(1, WIDTH)).sum().backward()
    said = ours.comm_stats()
    per_step, sent = validated["last_step"]["wire_bytes"], validated["wire_bytes"]
    assert [validated["steps"], said["steps"]] == [STEPS_OF_TRAIN, STEPS_OF_TRAIN + 1]
    assert STEPS_OF_TRAIN * per_step < sent < (STEPS_OF_TRAIN + 1) * per_step, "with validation"
    assert said["wire_bytes"] == sent + said["last_step"]["wire_bytes"], "which is in no step"
    assert len(ours._stats._running) == 0, "counts of one step"
    parameters, gradients = said["parameters"], said["gradients"]
    assert parameters["wire_bytes"] == (ranks - 1) * given[ALL_GATHER]
    assert gradients["wire_bytes"] == given["all_to_all_single"] // ranks * (ranks - 1)
    for kind in ("raw_bytes", "wire_bytes"):
        assert said[kind] == parameters[kind] + gradients[kind]
    assert said["ratio"] > 3.0
    assert ours.memory()["residual_bytes"] == 0
    ours.close()


def test_layers_that_are_unfrozen_and_frozen_again() -> None:
    """A part of a group, and a whole one."""
    mesh = init_device_mesh("cpu", (2,))

    native = [*chain(*train_in_phases(sharded(mesh), ours=None))]
    with compressed(mesh, "none", net=sharded(mesh), parameters="none") as (net, ours):
        assert all(map(torch.equal, native, chain(*train_in_phases(net, ours=ours))))
    keeps = {"parameters": INT8, "error_feedback": True}
    with compressed(mesh, "int8", net=sharded(mesh), **keeps) as (net, ours):
        near = [*chain(*train_in_phases(net, ours=ours))]
        assert ours.comm_stats()["steps"] == 8
        assert "first.weight" in of_all(ours.state_dict())[0]["errors"]
    assert not all(map(torch.equal, native, near))
    for own, exact in zip(near, native, strict=True):
        torch.testing.assert_close(own, exact, atol=0.02, rtol=0.2)


@RANKS
def test_uncompressed_it_trains_as_torch_which_is_back_after_close(ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Two ranks add in one order only.
    same = torch.equal if ranks == 2 else torch.allclose
    for how in ({}, {"mp_policy": bf16}, {"tied": True}):
        native = train(sharded(mesh, **how), ours=None)
        with compressed(mesh, "none", net=sharded(mesh, **how), parameters="none") as (net, _):
            trained = train(net, ours=None)
        assert all(same(a, b) for a, b in zip(native, trained, strict=True)), how
    compress_fsdp(net, "qsgd", mesh=mesh, parameters="int8").close()
    again = sharded(mesh, tied=True)
    load_weights(again, net.parameters())
    assert all(map(torch.equal, train(net, ours=None), train(again, ours=None)))


@pytest.mark.exhaustive
@pytest.mark.on_ranks(4)
def test_it_trains_as_without_and_ranks_compute_with_the_same_weights() -> None:
    mesh, ended = init_device_mesh("cpu", (4,)), {}
    for codec, settings in {
        "none": {"codec": "none", "parameters": "none"},
        "qsgd": RANDOM,
        "int8": FED_BACK,
        "int4": {**FED_BACK, "codec": f"int4:block_size={BLOCK}"},
    }.items():
        net = shard(small(), mesh)
        with compressed(mesh, net=net, **{"parameters": INT8, **settings}):
            losses = fit(net, steps=60)
            first, *others = of_all(net(data(99, 0)[0]).detach())
        assert all(torch.equal(each, first) for each in others), codec
        ended[codec] = sum(of_all(sum(losses[-10:]))) / 40
    none = ended.pop("none")
    assert none < losses[0] / 2
    assert all(abs(loss - none) < 0.05 * none for loss in ended.values()), ended


def pause(mesh: DeviceMesh, **settings: Any) -> tuple[list[Tensor], Any, list[Tensor]]:
    """Weights of a training in its middle, its state then, and its weights at the end."""
    with compressed_small(mesh, **settings) as (net, ours):
        fit(net)
        between, (state, *_) = weights(net), of_all(ours.state_dict())
        fit(net, first=STEPS)
    return between, state, weights(net)


@pytest.mark.parametrize(
    "settings",
    [{**RANDOM, "codec": "qsgd:bits=4,block_size=64"}, FED_BACK],
    ids=["random", "errors"],
)
@RANKS
def test_random_numbers_and_errors_go_on_after_a_pause(
    ranks: int, settings: dict[str, Any]
) -> None:
    """With the state there are the bits of a training without a pause, and else others."""
    mesh = init_device_mesh("cpu", (ranks,))
    between, state, straight = pause(mesh, **settings)
    for loads in (True, False):
        with compressed_small(mesh, seed=7, **settings) as (net, ours):
            load_weights(net, between)
            if loads:
                ours.load_state_dict(state)
            fit(net, first=STEPS)
        assert all(map(torch.equal, straight, weights(net))) == loads


@RANKS
def test_errors_go_to_other_blocks_and_ranks_or_what_is_dropped_is_said(ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    _, state, _ = pause(mesh, **FED_BACK)
    require_owed(state, "int8:block_size=32", mesh)
    if ranks == 4:
        half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))["shard"]
        require_owed(require_owed(state, INT8, half), INT8, mesh)
    with (
        compressed_small(mesh, codec="qsgd") as (_, ours),
        patch.object(shards.log, "warning") as warning,
    ):
        ours.load_state_dict(state)
    numel = sum(codes[0].numel() for _, codes in state["errors"].values())
    said = [call.args[0] % call.args[1:] for call in warning.mock_calls]
    assert len(said) == (dist.get_rank() == 0)
    assert all(f" {numel} elements" in each and "dropped" in each for each in said)


def require_owed(state: Any, codec: str, mesh: DeviceMesh) -> Any:
    """Ranks that load ``state`` owe together what it owes, to 8 bits; returns their state."""
    with compressed_small(mesh, **{**FED_BACK, "codec": codec}) as (_, ours):
        ours.load_state_dict(state)
        shared = [ours.state_dict()]
        dist.broadcast_object_list(shared, group=mesh.get_group(), group_src=0)
    before, after = state["errors"], shared[0]["errors"]
    # A bias of two ranks has no error where its shards are too small for a block.
    common = {"first.weight", "second.weight", "last.weight"} & before.keys() & after.keys()
    assert len(common) > 1
    for name in common:
        require_same_debt(small().get_parameter(name), before[name], after[name])
    return shared[0]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(2, marks=pytest.mark.on_ranks(2, hosts=2)),
        pytest.param(4, marks=[pytest.mark.on_ranks(4, hosts=2), pytest.mark.exhaustive]),
    ],
)
def test_a_profile_is_of_what_is_counted_and_changes_no_bits(ranks: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    with compressed_small(mesh, **RANDOM) as (plain, _):
        fit(plain)
    net = shard(small(), mesh)
    ours = compress_fsdp(net, mesh=mesh, parameters=INT8, **RANDOM)
    quiet = {"measure_links": False, "print_summary": False, "html": False}
    with CommProfiler(net, dirpath=tmp_path, **quiet) as profiler:
        fit(net)
    assert all(map(torch.equal, weights(plain), weights(net)))
    said, (group, *_) = ours.comm_stats(), parameter_groups_of(net)
    assert all(isinstance(each, QuantisedCollective) for each in collectives_of(group))
    sums = torch.tensor([said["last_step"][name] for name in ("intra_bytes", "inter_bytes")])
    dist.all_reduce(sums)
    summary = profiler.summary
    if summary is None:  # on other ranks than the first
        assert dist.get_rank() > 0
        return
    assert profiler.folder is not None
    run = read_run(profiler.folder)
    assert summary.steps + summary.warmup_steps == STEPS
    # Of steps this small not every one is recorded in detail.
    detailed = [step.spans for step in run.ranks[0].steps.values() if step.spans]
    assert detailed
    for spans in detailed:
        exchanges = [span.op for span in spans if span.phase == "exchange"]
        assert exchanges == GATHERED_AND_REDUCED
        assert all(span.blocks for span in spans)
    parts, traffic = summary.breakdown_ms, summary.traffic
    assert [traffic.intra_bytes, traffic.inter_bytes] == [each / ranks for each in sums.tolist()]
    assert traffic.raw_bytes == said["last_step"]["raw_bytes"]
    assert ["qsgd" in each.codec for each in summary.buckets] == [True, True]
    assert 0 < summary.exposed_fsdp_ms <= summary.exposed_ms
    assert min(parts["exposed_codec"], parts["exposed_transfer"]) > 0
    assert math.isclose(sum(parts.values()), summary.detailed_step_ms)
    assert "shorter than" in summary.unavailable["predictions"]
    observed = observe(run)
    settings = scenarios_of(observed.scenario, observed.scenario)
    cost = CodecCost("any", "two_shot", 1.0, encode=1e-9, decode=1e-9, store=1e-9)
    simulated = predict(observed, settings, costs=dict.fromkeys(("none", "int8", "int4"), cost))
    assert math.isclose(simulated.baseline.sent_mb, 1e-6 * sums[1].item() / 2)
    assert len(simulated.scenarios) == 1 + 3 * 2 + 2
    assert all(each.step_ms > each.exposed_ms > 0 for each in simulated.scenarios)


def of_two_dtypes(mesh: DeviceMesh) -> nn.Module:
    net = Net()
    net.last.to(torch.bfloat16)
    return fully_shard(net, mesh=mesh)


def test_what_cannot_work_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fp16 = MixedPrecisionPolicy(param_dtype=torch.float16)
    offload = CPUOffloadPolicy(pin_memory=False)
    scaled = {"error_feedback": True, "grad_scaler": torch.amp.GradScaler("cpu")}
    unequal = "qsgd" if dist.get_rank() else "terngrad"

    def attempt(net: Any = None, codec: str = "qsgd", **given: Any) -> object:
        net = net or sharded(mesh)
        return compress_fsdp(net, codec, **{"mesh": mesh, "parameters": "int8", **given})

    cases: list[tuple[str, Callable[[], object]]] = [
        ("got a GradScaler", lambda: attempt(codec="int8", **scaled)),
        ("error_feedback=True", lambda: attempt(codec="int8")),
        ("Error feedback diverges", lambda: attempt(error_feedback=True)),
        ("not sparse", lambda: attempt(codec="topk")),
        ("must be of blocks", lambda: attempt(codec="powersgd")),
        ("Parameters are gathered whole", lambda: attempt(parameters="topk")),
        ("Parameters are gathered whole", lambda: attempt(parameters="qsgd")),
        ("leave start_step and state_update out", lambda: attempt(start_step=3)),
        ("leave start_step and state_update out", lambda: attempt(state_update="deferred")),
        ("fully_shard has sharded over all ranks", lambda: attempt(Net())),
        ("with several replicas", lambda: attempt(sharded(replicas["shard"]), mesh=replicas)),
        ("float16", lambda: attempt(sharded(mesh, mp_policy=fp16))),
        ("CPUOffloadPolicy", lambda: attempt(sharded(mesh, offload_policy=offload))),
        ("one floating-point dtype", lambda: attempt(of_two_dtypes(mesh))),
        ("differ in", lambda: attempt(codec=unequal)),
    ]
    for says, case in cases:
        with pytest.raises(ValueError, match=re.escape(says)):
            case()
