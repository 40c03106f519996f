"""What ranks of a model-parallel strategy do: started by `test_model_parallel.py`.

torchrun model_parallel_ranks.py FOLDER SCENARIO...; leaves facts of every scenario. Ranks are on
two hosts, by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

if "RANK" in os.environ:
    os.environ["LIGHTNING_DIST_HOSTNAME"] = f"host{int(os.environ['RANK']) // 2}"

import accelerate_fsdp
import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import (
    AsyncCheckpoint,
    CommProfiler,
    CompressedModelParallelStrategy,
    OneBitAdam,
)
from lightning_dist.fabric import CompressedModelParallelStrategy as CompressedFabric
from lightning_dist.private import collectives_of, parameter_groups_of
from lightning_dist.profiling.run import read_run
from lightning_dist.profiling.whatif.observe import observe

WIDTH = 18
BATCHES = 4
FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")  # tests import this module too
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Module(L.LightningModule):
    """Sharded over the data-parallel dimension; ``native``: by HSDP, with a mesh of its own."""

    def __init__(self, *, native: bool = False, optimizer: Any = torch.optim.Adam, **given: Any):
        super().__init__()
        self.native, self.given, self.optimizer = native, given, optimizer
        self.blocks: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        torch.manual_seed(3)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        ]
        self.blocks = nn.Sequential(*blocks)
        mesh = self.device_mesh["data_parallel"]
        if self.native:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for block in blocks:
            if self.device_mesh["tensor_parallel"].size() > 1:
                how = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(block, self.device_mesh["tensor_parallel"], how)
            fully_shard(block, mesh=mesh, **self.given)
        fully_shard(self.blocks, mesh=mesh, **self.given)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        loss = (self.blocks(x) - x.flip(-1)).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.blocks(batch[0])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        count = 4 * BATCHES * 2
        data = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(data), batch_size=2, shuffle=False)

    val_dataloader = train_dataloader


class NativeHSDP(ModelParallelStrategy):
    """Accumulates as torch's HSDP can: without the reduction between replicas."""

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        net = self.lightning_module.blocks
        net.set_requires_all_reduce(False)
        yield
        net.set_requires_all_reduce(True)


class Memory(DummyLogger):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.metrics.update(metrics)


def ours(codec: str = "int8", **given: Any) -> CompressedModelParallelStrategy:
    return CompressedModelParallelStrategy(codec, min_compress_numel=0, **given)


def trainer(strategy: Any, **given: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": 2}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"devices": dist_size(), "limit_val_batches": 0, "default_root_dir": FOLDER}
    return L.Trainer(strategy=strategy, **{**quiet, **given})


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def weights(module: L.LightningModule) -> list[Tensor]:
    return [p.detach().to_local().clone() for p in module.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def replicas_are_equal(module: L.LightningModule) -> bool:
    mesh = module.device_mesh["replicate"]
    for held in weights(module):
        first = held.clone()
        dist.broadcast(first, group_src=0, group=mesh.get_group())
        if not torch.equal(first, held):
            return False
    return True


def fitted(strategy: Any, module: Module | None = None, **given: Any) -> tuple[L.Trainer, Module]:
    module = module or Module()
    path = given.pop("ckpt_path", None)
    found = trainer(strategy, **given)
    found.fit(module, ckpt_path=path)
    return found, module


def equal_to_native(**how: Any) -> dict[str, bool]:
    """Codec none against torch's HSDP under Lightning's strategy, clipping and accumulation."""
    given = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    native = NativeHSDP(data_parallel_size=4, tensor_parallel_size=1)
    _, expected = fitted(native, Module(native=True, **how), **given)
    _, got = fitted(ours("none"), Module(**how), **given)
    equal = same(weights(expected), weights(got))
    return {"equal": equal, "losses": expected.losses == got.losses}


def equal_to_native_bf16() -> dict[str, bool]:
    return equal_to_native(mp_policy=BF16)


def reports() -> dict[str, Any]:
    """Mesh, samplers, bytes, logged metrics and a second fit."""
    logger = Memory()
    found, module = fitted(ours(), logger=logger, log_every_n_steps=1)
    strategy: Any = found.strategy
    stats, logged = strategy.comm_stats(), dict(logger.metrics)
    residuals = [part.clone() for part in held(strategy)]
    found.fit_loop.max_epochs = 3
    found.fit(module)
    return {
        "codec": strategy.comm_config()["codec"],
        "sampler": strategy.distributed_sampler_kwargs,
        "mesh": dict(zip(module.device_mesh.mesh_dim_names, module.device_mesh.shape, strict=True)),
        "topology": strategy.topology.by_host(),
        "stats": {key: stats[key] for key in ("steps", "raw_bytes", "wire_bytes", "inter_bytes")},
        "logged": {key: value for key, value in logged.items() if key.startswith("comm/")},
        "equal": replicas_are_equal(module),
        "steps": strategy._reducer.step,
        "residuals": bool(residuals),
        "grad scaler": under_grad_scaler(),
        "by name": type(trainer("compressed_model_parallel").strategy) is type(strategy),
    }


def under_grad_scaler() -> bool:
    """Whether reducers of Lightning and Fabric know of the GradScaler in use."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    found, _ = fitted(ours(), plugins=[precision], max_steps=1)
    of_fabric = under_fabric("int8")
    Run(of_fabric, plugins=[FabricMixedPrecision("16-mixed", "cpu", scaler=scaler)])
    (reducer,) = of_fabric.reducers
    return found.strategy._reducer.has_grad_scaler and reducer.has_grad_scaler


def held(strategy: Any) -> list[Tensor]:
    residuals = strategy._reducer.residuals
    return [residuals[name] for name in sorted(residuals)]


def accumulation() -> dict[str, int]:
    """Steps that were exchanged, of four batches each."""
    found, _ = fitted(ours(), accumulate_grad_batches=4)
    return {"steps": found.strategy.comm_stats()["steps"], "optimizer": found.global_step}


def resumed(**given: Any) -> dict[str, bool]:
    """A fit that goes on from a checkpoint of another, against one that does it in one go."""
    _, straight = fitted(ours("int4", **given))
    first, _ = fitted(ours("int4", **given), max_epochs=1)
    path = FOLDER / "-".join(["ckpt", *map(str, given.values())])
    first.save_checkpoint(path)
    again = Module()
    second = trainer(ours("int4", **given))
    second.fit(again, ckpt_path=path)
    facts = {"equal": same(weights(straight), weights(again))}
    facts["both epochs"] = second.strategy._reducer.step == 2 * second.num_training_batches
    kept = [part.clone() for part in held(second.strategy)]
    facts["residuals"] = bool(kept) and any(bool(part.any()) for part in kept)
    if given.get("tensor_parallel_size", 1) > 1:
        whole, _ = fitted(ours("int4"), ckpt_path=path)
        steps = first.num_training_batches + BATCHES  # each epoch with its own number of ranks
        facts["residuals of parts go on"] = whole.strategy._reducer.step == steps
    elif given:  # the same by Lightning's own strategy, and back
        plain = trainer(NativeHSDP(data_parallel_size=4, tensor_parallel_size=1), max_epochs=2)
        plain.fit(Module(native=True), ckpt_path=path)
        facts["loads under Lightning's"] = plain.global_step == 2 * BATCHES
    return facts


def resume() -> dict[str, bool]:
    return resumed()


def resume_one_file() -> dict[str, bool]:
    return resumed(save_distributed_checkpoint=False)


def resume_tensor_parallel() -> dict[str, bool]:
    return resumed(tensor_parallel_size=2)


def tensor_parallel() -> dict[str, Any]:
    found, module = fitted(ours(tensor_parallel_size=2))
    sampler = found.strategy.distributed_sampler_kwargs
    return {"equal": replicas_are_equal(module), "sampler": sampler}


def evaluation() -> dict[str, bool]:
    """Nothing is compressed, and one replica trains as FSDP does."""
    found = trainer(ours(), limit_val_batches=1)
    found.validate(Module(), verbose=False)
    alone, module = fitted(ours(replicate_size=1))
    _, native = fitted(ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1))
    return {
        "validated": found.strategy.comm_stats() == {},
        "one replica": same(weights(module), weights(native)),
        "no bytes": alone.strategy.comm_stats() == {},
    }


def sharded_over_all() -> dict[str, bool]:
    """One replica of all ranks, parameters and gradients quantised, against the strategy itself."""
    plain = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
    _, expected = fitted(plain, accumulate_grad_batches=2)
    facts = {}
    for codec, parameters in (("none", "none"), ("qsgd:bits=8,block_size=64", "int8")):
        strategy, logger = ours(codec, parameters=parameters), Memory()
        _, got = fitted(strategy, accumulate_grad_batches=2, logger=logger, log_every_n_steps=1)
        far = 1e-5 if codec == "none" else 0.02
        pairs = zip(expected.losses, got.losses, strict=True)
        facts[f"{codec} trains"] = all(abs(a - b) < far * a for a, b in pairs)
        stats = strategy.comm_stats()
        facts[f"{codec} sends"] = stats["ratio"] == 1 if codec == "none" else stats["ratio"] > 2
        facts[f"{codec} logs"] = logger.metrics["comm/total_wire_bytes"] == stats["wire_bytes"]
        facts[f"{codec} counts"] = stats["steps"] == len(got.losses)  # of each micro-batch
        said = strategy.comm_config()["parameters"].lower()
        facts[f"{codec} says"] = ("int8" in said) == (parameters == "int8")
        facts[f"{codec} has no reducer"] = not strategy.reducers
    return facts


QUANTISED: dict[str, Any] = {"codec": "qsgd:bits=4,block_size=64", "parameters": "int8"}
FED_BACK: dict[str, Any] = {"codec": "int4", "parameters": "int8", "error_feedback": True}


def shards_resume() -> dict[str, bool]:
    """Random rounding and errors go on, from checkpoints of Lightning and AsyncCheckpoint."""
    facts = {}
    for settings in (QUANTISED, FED_BACK):
        _, straight = fitted(ours(**settings))
        folder = FOLDER / f"shards {settings['codec']}"
        saved = AsyncCheckpoint(folder, format="sharded", filename="async")
        given = {"max_epochs": 1, "enable_checkpointing": True, "callbacks": [saved]}
        first, _ = fitted(ours(**settings), **given)
        first.save_checkpoint(folder / "theirs")
        for name in ("async.ckpt", "theirs"):
            _, again = fitted(ours(**settings), ckpt_path=folder / name)
            facts[f"{settings['codec']}, {name}"] = same(weights(straight), weights(again))
    other, _ = fitted(ours("int4"), ckpt_path=folder / "theirs")
    facts["loads between replicas"] = other.strategy._reducer.step == BATCHES
    return facts


def shards_fabric() -> dict[str, bool]:
    """Quantised collectives under Fabric: bytes, and a run that goes on from a checkpoint."""
    straight, first, second = (Run(under_fabric(**QUANTISED)) for _ in range(3))
    whole = straight.train(4)
    first.train(2)
    first.fabric.save(FOLDER / "fabric shards", first.state)
    second.train(1)
    second.fabric.load(FOLDER / "fabric shards", second.state)
    (stats,) = second.fabric.strategy.comm_stats()
    return {"resumed": same(whole, second.train(2)), "bytes": stats["ratio"] > 2}


def refusals() -> dict[str, str]:
    """Messages by what is wrong."""
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    half = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    cases: dict[str, Any] = {
        "offload": lambda: fitted(ours(), Module(**offload)),
        "reduce dtype": lambda: fitted(ours(), Module(**half)),
        "native HSDP": lambda: fitted(ours(), Module(native=True)),
        "16-true": lambda: fitted(ours(), precision="16-true"),
        "sizes": lambda: fitted(ours(replicate_size=3)),
        "hosts": on_unequal_hosts,
        "OneBitAdam": lambda: fitted(ours(), Module(optimizer=partial(OneBitAdam, freeze_step=2))),
        "second momentum": lambda: fitted(ours("dgc")),
        "replicas": lambda: ours("qsgd", parameters="int8", replicate_size=2),
        "biased": lambda: ours("int8", parameters="int8"),
        "start": lambda: ours("qsgd", parameters="int8", start_step=2),
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = ""
        except (ValueError, TypeError) as error:
            found[name] = str(error)
    return found


def on_unequal_hosts() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_DIST_HOSTNAME", f"host{int(os.environ['RANK']) // 3}")
        return fitted(ours())


def parallelize(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in net:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])


def native_hsdp(net: nn.Module, _: DeviceMesh) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in net:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


class Run:
    """A loop under Fabric; micro-batches of two."""

    def __init__(self, strategy: Any, **given: Any) -> None:
        self.fabric = L.Fabric(accelerator="cpu", devices=dist_size(), strategy=strategy, **given)
        self.fabric.launch()
        torch.manual_seed(3)
        sizes = (WIDTH, 2 * WIDTH, WIDTH)
        self.net = self.fabric.setup_module(
            nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
        )
        self.optimizer = self.fabric.setup_optimizers(torch.optim.Adam(self.net.parameters()))
        self.state = {"model": self.net, "optimizer": self.optimizer, "step": 0}

    def train(self, steps: int, *, native: bool = False) -> list[Tensor]:
        begin = self.state["step"]
        for step in range(begin, begin + steps):
            generator = torch.Generator().manual_seed(4 * step + dist.get_rank())
            for last in (False, True):
                x = torch.randn(3, WIDTH, generator=generator)
                if native:
                    self.net.set_requires_all_reduce(last)
                with nullcontext() if native else self.waiting(not last):
                    self.fabric.backward((self.net(x) - x.flip(-1)).square().mean())
            self.fabric.clip_gradients(self.net, self.optimizer, max_norm=0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.state["step"] = begin + steps
        return [p.detach().to_local().clone() for p in self.net.parameters()]

    def waiting(self, enabled: bool) -> Any:
        return self.fabric.no_backward_sync(self.net, enabled=enabled)


def under_fabric(codec: str, **given: Any) -> CompressedFabric:
    return CompressedFabric(parallelize, codec, min_compress_numel=0, **given)


def fabric() -> dict[str, bool]:
    """Fabric: codec none against torch's HSDP."""
    native = FabricModelParallel(native_hsdp, data_parallel_size=4, tensor_parallel_size=1)
    expected = Run(native).train(3, native=True)
    return {"equal to native": same(expected, Run(under_fabric("none")).train(3))}


def fabric_resume() -> dict[str, bool]:
    """A run under Fabric that goes on from a checkpoint."""
    straight, first, second = (Run(under_fabric("int4")) for _ in range(3))
    whole = straight.train(4)
    first.train(2)
    first.fabric.save(FOLDER / "fabric", first.state)
    second.train(1)  # what it owes is forgotten
    second.fabric.load(FOLDER / "fabric", second.state)
    (stats,) = second.fabric.strategy.comm_stats()
    return {
        "resumed": same(whole, second.train(2)),
        "bytes": stats["inter_bytes"] < 0.3 * stats["raw_bytes"],
        "hosts": second.fabric.strategy.topology.by_host() == ((0, 1), (2, 3)),
    }


def profile() -> dict[str, Any]:
    """Facts of rank 0; what other ranks have is in its summary."""
    _, plain = fitted(ours(), accumulate_grad_batches=2)
    profiler = CommProfiler(dirpath=FOLDER / "profile", measure_links=False, print_summary=False)
    with pytest.MonkeyPatch.context() as patch:
        given = count_collectives(patch)
        _, module = fitted(ours(), callbacks=[profiler], accumulate_grad_batches=2)
    facts = {"rank": dist.get_rank(), "same bits": same(weights(plain), weights(module))}
    comms = [
        each for block in module.blocks for each in collectives_of(*parameter_groups_of(block))
    ]
    facts["given back"] = {type(each).__module__.partition(".")[0] for each in comms} == {"torch"}
    summary = profiler.summary
    if summary is None:
        return facts
    parts = summary.breakdown_ms
    assert profiler.folder is not None
    observed = observe(read_run(profiler.folder))
    return {
        **facts,
        "observed": (observed.scenario.form, observed.scenario.counts, observed.elements),
        "not predicted": summary.unavailable["predictions"],
        "given": sum(given),
        "calls": len(given),
        "intra bytes": summary.traffic.intra_bytes,
        "exposed": (summary.exposed_fsdp_ms, summary.exposed_ms),
        "rest": parts["other"],
        "step": (sum(parts.values()), summary.detailed_step_ms),
        "steps": summary.steps + summary.warmup_steps,
        "buckets": len(summary.buckets),
        "inter bytes": summary.traffic.inter_bytes,
        "bytes": summary.traffic.wire_bytes,
        "transfer": summary.breakdown_ms["exposed_transfer"],
        "waits": sorted(each.rank for each in summary.ranks),
        "errors": bool(summary.errors),
    }


def count_collectives(patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that this rank sends in each collective of FSDP itself."""
    sent: list[int] = []
    for name in ("all_gather_single", "reduce_scatter_single"):
        plain = getattr(dist, name)

        def call(
            output: Any, input: Any, *, plain: Any = plain, group: Any = None, **how: Any
        ) -> Any:
            if output.dtype == torch.float32:  # ours are bytes
                sent.append((group.size() - 1) * min(output.nbytes, input.nbytes))
            return plain(output, input, group=group, **how)

        patch.setattr(dist, name, call)
    return sent


def accelerate() -> dict[str, Any]:
    return accelerate_fsdp.facts()


def accelerate_resume() -> dict[str, Any]:
    return accelerate_fsdp.resume(FOLDER)


def shards_accelerate() -> dict[str, Any]:
    return accelerate_fsdp.shards(FOLDER)


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        facts = globals()[name]()
        torch.save({"facts": facts}, FOLDER / f"{name}.{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
