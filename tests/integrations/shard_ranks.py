"""What ranks of a model do that is sharded over all of them: started by `test_fsdp_shards.py`.

torchrun shard_ranks.py FOLDER SCENARIO...
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import WIDTH, Net, counted_passes, local, sharded, train, weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from lightning_dist import CommProfiler
from lightning_dist.integrations.torch.fsdp.attach import compress_fsdp
from lightning_dist.integrations.torch.fsdp.shards import QuantisedCollective
from lightning_dist.measurement.costs import CodecCost
from lightning_dist.private import collectives_of, parameter_groups_of
from lightning_dist.profiling.run import read_run
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import predict
from lightning_dist.profiling.whatif.scenarios import scenarios_of

FOLDER = Path(sys.argv[1])
STEPS = 6
STEPS_OF_TRAIN = 3
BLOCK = 64
RATE = 0.1
PARAMETERS = f"int8:block_size={BLOCK}"
GATHERED_AND_REDUCED = 2 * ["all_gather"] + ["all_gather", "all_to_all", "all_to_all"]
"""Forward of the outermost module and the one in it; backward of that; gradients of both."""
FED_BACK = {"error_feedback": True, "min_compress_numel": 0}


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


def shard(net: nn.Module, mesh: DeviceMesh, **given: Any) -> nn.Module:
    fully_shard(net.second, mesh=mesh, **given)
    return fully_shard(net, mesh=mesh, **given)


def equal_to_twin(mesh: DeviceMesh) -> dict[str, Any]:
    """In float64, so that what is left is nothing but the rounding of float64."""
    net = shard(small(), mesh)
    ours = compress_fsdp(
        net, f"int8:block_size={BLOCK}", mesh=mesh, parameters=PARAMETERS, **FED_BACK
    )
    fit(net)
    expected = twin(mesh.size())
    found = [parameter.full_tensor() for parameter in net.parameters()]
    far = [float((a - b).abs().max()) for a, b in zip(found, small().parameters(), strict=True)]
    near = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    ours.close()
    return {"from the twin": max(near), "from the start": min(far)}


def bytes_sent(mesh: DeviceMesh) -> dict[str, Any]:
    """What is given to the process group, against what is said of it."""
    given = {"all_gather_single": 0, "all_to_all_single": 0}
    plain = {name: getattr(dist, name) for name in given}

    def counting(name: str) -> Callable[..., Any]:
        def call(output: Tensor, own: Tensor, *args: Any, **kwargs: Any) -> Any:
            assert own.dtype == torch.uint8
            given[name] += own.nbytes
            return plain[name](output, own, *args, **kwargs)

        return call

    net = sharded(mesh)
    ours = compress_fsdp(
        net, "qsgd:bits=8,block_size=64", mesh=mesh, parameters=PARAMETERS, min_compress_numel=0
    )
    for name in given:
        setattr(dist, name, counting(name))
    train(net, ours=None)
    with torch.no_grad():
        net(torch.ones(1, WIDTH))
    validated = ours.comm_stats()
    for _ in range(2):
        net(torch.ones(1, WIDTH))
    net(torch.ones(1, WIDTH)).sum().backward()
    for name, function in plain.items():
        setattr(dist, name, function)
    said, size = ours.comm_stats(), mesh.size()
    per_step = validated["last_step"]["wire_bytes"]
    ours.close()
    kinds = ("parameters", "gradients")
    return {
        "steps": [validated["steps"], said["steps"]] == [STEPS_OF_TRAIN, STEPS_OF_TRAIN + 1],
        "validation is in the totals": STEPS_OF_TRAIN * per_step
        < validated["wire_bytes"]
        < (STEPS_OF_TRAIN + 1) * per_step,
        "and in no step": said["wire_bytes"]
        == validated["wire_bytes"] + said["last_step"]["wire_bytes"],
        "counts of one step": len(ours._stats._running) == 0,
        "raw": said["raw_bytes"] == sum(said[kind]["raw_bytes"] for kind in kinds),
        "parameters": said["parameters"]["wire_bytes"] == (size - 1) * given["all_gather_single"],
        "gradients": said["gradients"]["wire_bytes"]
        == given["all_to_all_single"] // size * (size - 1),
        "sum": said["wire_bytes"]
        == said["parameters"]["wire_bytes"] + said["gradients"]["wire_bytes"],
        "a third": said["ratio"] > 3.0,
        "nothing kept": ours.memory()["residual_bytes"] == 0,
    }


def uncompressed(mesh: DeviceMesh) -> dict[str, Any]:
    """Codec none against FSDP itself, and what is left when ours is closed."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for name, how in (
        ("fp32", {}),
        ("bf16 compute", {"mp_policy": bf16}),
        ("tied", {"tied": True}),
    ):
        native = train(sharded(mesh, **how), ours=None)
        net = sharded(mesh, **how)
        ours = compress_fsdp(net, "none", mesh=mesh, parameters="none")
        trained = train(net, ours=None)
        pairs = list(zip(native, trained, strict=True))
        # Two ranks add in one order only.
        same = torch.equal if mesh.size() == 2 else torch.allclose
        found[name] = all(same(a, b) for a, b in pairs)
        ours.close()
    ours = compress_fsdp(net, "qsgd", mesh=mesh, parameters="int8")
    ours.close()
    again = sharded(mesh, tied=True)
    with torch.no_grad():
        for a, b in zip(again.parameters(), net.parameters(), strict=True):
            local(a).copy_(local(b))
    found["closed"] = all(map(torch.equal, train(net, ours=None), train(again, ours=None)))
    return found


def training(mesh: DeviceMesh) -> dict[str, Any]:
    """Mean loss of the last steps, by codec; and whether ranks compute with the same weights."""
    codecs: dict[str, dict[str, Any]] = {
        "none": {},
        "qsgd:bits=8,block_size=64": {"min_compress_numel": 0},
        f"int8:block_size={BLOCK}": FED_BACK,
        f"int4:block_size={BLOCK}": FED_BACK,
    }
    found: dict[str, Any] = {}
    for codec, settings in codecs.items():
        net = shard(small(), mesh)
        parameters = "none" if codec == "none" else PARAMETERS
        ours = compress_fsdp(net, codec, mesh=mesh, parameters=parameters, **settings)
        losses = fit(net, steps=60)
        probe = net(data(99, 0)[0]).detach()
        first = probe.clone()
        dist.broadcast(first, 0)
        mean = torch.tensor(losses[-10:]).mean()
        dist.all_reduce(mean)
        found[codec] = float(mean) / mesh.size()
        found.setdefault("equal", []).append(torch.equal(probe, first))
        ours.close()
    found["begins"] = losses[0]
    return found


def resumed(mesh: DeviceMesh) -> dict[str, Any]:
    """An interrupted run has the bits of one that was not: random numbers and errors go on."""
    random, _ = resumed_with(mesh, "qsgd:bits=4,block_size=64", {"min_compress_numel": 0})
    codec = f"int8:block_size={BLOCK}"
    fed_back, state = resumed_with(mesh, codec, FED_BACK)
    found = {**random, **{f"{name}, errors": value for name, value in fed_back.items()}}
    found["owed in other blocks"] = conserves(state, "int8:block_size=32", mesh)[0]
    found["says what it drops"] = says_what_it_drops(state, mesh)
    if mesh.size() == 4:
        half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))["shard"]
        found["owed by two ranks"], of_two = conserves(state, codec, half)
        found["owed by four again"] = conserves(of_two, codec, mesh)[0]
    return found


def conserves(state: Any, codec: str, mesh: DeviceMesh) -> tuple[bool, Any]:
    """Whether ranks that load ``state`` owe together what it owes, to 8 bits; and their state."""
    ours = compress_fsdp(shard(small(), mesh), codec, mesh=mesh, parameters=PARAMETERS, **FED_BACK)
    ours.load_state_dict(state)
    shared = [ours.state_dict()]
    dist.broadcast_object_list(shared, group=mesh.get_group(), group_src=0)
    ours.close()
    before, after = owed(state), owed(shared[0])
    # A bias of two ranks has no error where its shards are too small for a block.
    common = {"first.weight", "second.weight", "last.weight"} & before.keys() & after.keys()
    equal = len(common) > 1
    for name in common:
        error, (now, largest) = before[name][0], after[name]
        equal &= bool(error.any()) and bool(((now - error).abs() <= 0.0041 * largest).all())
    return equal, shared[0]


def says_what_it_drops(state: Any, mesh: DeviceMesh) -> bool:
    """Whether the first rank warns of errors that are not kept here."""
    heard = BufferingHandler(100)
    logging.getLogger("lightning_dist").addHandler(heard)
    ours = compress_fsdp(shard(small(), mesh), "qsgd", mesh=mesh, parameters=PARAMETERS)
    ours.load_state_dict(state)
    ours.close()
    logging.getLogger("lightning_dist").removeHandler(heard)
    numel = sum(codes[0].numel() for _, codes in state["errors"].values())
    said = [each.getMessage() for each in heard.buffer if "dropped" in each.getMessage()]
    return len(said) == (dist.get_rank() == 0) and all(
        f" {numel} elements" in each for each in said
    )


def owed(state: Any) -> dict[str, tuple[Tensor, float]]:
    """Mean of the ranks' errors of each parameter, and the largest error of one."""
    found = {}
    for name, parameter in small().named_parameters():
        if name in state["errors"]:
            scales, codes = state["errors"][name]
            errors = codes.double() * scales.double()
            numel = as_rows(parameter, codes.shape[1]).shape[1]
            rows = errors.mean(0).flatten(1)[:, :numel]
            found[name] = from_rows(rows, parameter), float(errors.abs().max())
    return found


def resumed_with(
    mesh: DeviceMesh, codec: str, given: dict[str, Any]
) -> tuple[dict[str, bool], Any]:
    """A run that is interrupted, and its state then."""
    settings = {"parameters": PARAMETERS, **given}
    straight = shard(small(), mesh)
    ours = compress_fsdp(straight, codec, mesh=mesh, **settings)
    fit(straight)
    between, shared = weights(straight), [ours.state_dict()]
    dist.broadcast_object_list(shared)
    fit(straight, first=STEPS)
    ours.close()
    again, other = (shard(small(7), mesh) for _ in range(2))
    for net in (again, other):
        with torch.no_grad():
            for parameter, held in zip(net.parameters(), between, strict=True):
                local(parameter).copy_(held)
        ours = compress_fsdp(net, codec, mesh=mesh, **settings)
        if net is again:
            ours.load_state_dict(shared[0])
        fit(net, first=STEPS)
        ours.close()
    return {
        "equal": all(map(torch.equal, weights(straight), weights(again))),
        "else other bits": not all(map(torch.equal, weights(straight), weights(other))),
    }, shared[0]


def compiled_kernels(mesh: DeviceMesh) -> dict[str, bool]:
    """Compiled passes have the bits of the eager ones, and stand in for those of large shards."""
    found = []
    for wish in (False, True):
        eager, compiled = Counter[str](), Counter[str]()
        with counted_passes(eager, compiled):
            net = sharded(mesh)
            codec = "int8:block_size=16"
            ours = compress_fsdp(
                net, codec, mesh=mesh, parameters=codec, compile_kernels=wish, **FED_BACK
            )
            eager.clear()  # of the comparison at set-up
            compiled.clear()
            trained = train(net, ours=None)
        errors = [of for each in ours._reductions.values() for part in each.errors for of in part]
        found.append((trained + [each.clone() for each in errors], eager.total(), compiled))
        ours.close()
    (before, without, nothing), (after, remain, instead) = found
    return {
        "equal": len(before) == len(after) and all(map(torch.equal, before, after)),
        "none without": not nothing,
        "all passes": set(instead) == {"encode", "encode_and_commit", "decode_and_commit"},
        "instead of eager ones": without - remain == instead.total(),
    }


def profile(mesh: DeviceMesh) -> dict[str, Any]:
    """A profile of two hosts, against a run without one and what is counted of it."""
    settings = {"codec": "qsgd:bits=8,block_size=64", "parameters": PARAMETERS}
    settings["min_compress_numel"] = 0
    plain = shard(small(), mesh)
    ours = compress_fsdp(plain, mesh=mesh, **settings)
    fit(plain)
    ours.close()
    net = shard(small(), mesh)
    host = f"host{dist.get_rank() // (mesh.size() // 2)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_DIST_HOSTNAME", host)
        ours = compress_fsdp(net, mesh=mesh, **settings)
        quiet = {"measure_links": False, "print_summary": False, "html": False}
        with CommProfiler(net, dirpath=FOLDER / f"profile{mesh.size()}", **quiet) as profiler:
            fit(net)
    said, (group, *_) = ours.comm_stats(), parameter_groups_of(net)
    facts = {
        "same bits": all(map(torch.equal, weights(plain), weights(net))),
        "given back": all(isinstance(x, QuantisedCollective) for x in collectives_of(group)),
    }
    sums = torch.tensor([said["last_step"][name] for name in ("intra_bytes", "inter_bytes")])
    dist.all_reduce(sums)
    summary = profiler.summary
    if summary is None:
        return facts
    assert profiler.folder is not None
    run = read_run(profiler.folder)
    observed = observe(run)
    settings_of = scenarios_of(observed.scenario, observed.scenario)
    cost = CodecCost("any", "two_shot", 1.0, encode=1e-9, decode=1e-9, store=1e-9)
    simulated = predict(observed, settings_of, costs=dict.fromkeys(("none", "int8", "int4"), cost))
    # Of steps this small not every one is recorded in detail.
    detailed = [step.spans for step in run.ranks[0].steps.values() if step.spans]
    exchanges = [[span for span in spans if span.phase == "exchange"] for spans in detailed]
    parts, traffic = summary.breakdown_ms, summary.traffic
    means = [total / mesh.size() for total in sums.tolist()]
    return facts | {
        "steps": summary.steps + summary.warmup_steps == STEPS,
        "collectives": bool(exchanges)
        and all([span.op for span in each] == GATHERED_AND_REDUCED for each in exchanges),
        "all hold up": all(span.blocks for spans in detailed for span in spans),
        "bytes": [traffic.intra_bytes, traffic.inter_bytes] == means,
        "bytes uncompressed": traffic.raw_bytes == said["last_step"]["raw_bytes"],
        "buckets": ["qsgd" in each.codec for each in summary.buckets] == [True, True],
        "exposed": 0 < summary.exposed_fsdp_ms <= summary.exposed_ms,
        "parts": min(parts["exposed_codec"], parts["exposed_transfer"]) > 0,
        "all of it": math.isclose(sum(parts.values()), summary.detailed_step_ms),
        "not predicted": "shorter than" in summary.unavailable["predictions"],
        "simulated bytes": math.isclose(simulated.baseline.sent_mb, 1e-6 * sums[1].item() / 2),
        "settings": len(simulated.scenarios) == 1 + 3 * 2 + 2,
        "simulated": all(each.step_ms > each.exposed_ms > 0 for each in simulated.scenarios),
    }


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """Messages by what is wrong."""
    fp16 = MixedPrecisionPolicy(param_dtype=torch.float16)
    world = mesh.size()
    replicas = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))

    def mixed() -> nn.Module:
        net = Net()
        net.last.to(torch.bfloat16)
        return fully_shard(net, mesh=mesh)

    def attempt(net: Any, codec: str = "qsgd", *, on: DeviceMesh = mesh, **given: Any) -> object:
        return compress_fsdp(net, codec, mesh=on, **{"parameters": "int8", **given})

    offload = CPUOffloadPolicy(pin_memory=False)
    scaler = torch.amp.GradScaler("cpu")
    cases: dict[str, Callable[[], object]] = {
        "scaled": lambda: attempt(sharded(mesh), "int8", error_feedback=True, grad_scaler=scaler),
        "biased": lambda: attempt(sharded(mesh), "int8"),
        "fed back": lambda: attempt(sharded(mesh), "qsgd", error_feedback=True),
        "sparse": lambda: attempt(sharded(mesh), "topk"),
        "matrices": lambda: attempt(sharded(mesh), "powersgd"),
        "sparse parameters": lambda: attempt(sharded(mesh), parameters="topk"),
        "random parameters": lambda: attempt(sharded(mesh), parameters="qsgd"),
        "start": lambda: attempt(sharded(mesh), start_step=3),
        "commit": lambda: attempt(sharded(mesh), commit="deferred"),
        "not sharded": lambda: attempt(Net()),
        "several replicas": lambda: attempt(sharded(replicas["shard"]), on=replicas),
        "fp16": lambda: attempt(sharded(mesh, mp_policy=fp16)),
        "offload": lambda: attempt(sharded(mesh, offload_policy=offload)),
        "dtypes": lambda: attempt(mixed()),
        "unequal": lambda: attempt(sharded(mesh), "qsgd" if dist.get_rank() else "terngrad"),
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


def main() -> None:
    scenarios = sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in scenarios:
        facts = globals()[name](mesh)
        path = FOLDER / f"{name}.{mesh.size()}.{dist.get_rank()}.pt"
        torch.save({"facts": facts}, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
