"""``compressed_model_parallel`` under a Trainer and Fabric: two nodes of two ranks."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from fsdp_models import mesh_of, replicas_are_equal, weights
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from model_parallel_runs import (
    BATCHES,
    FabricRun,
    Memory,
    Module,
    NativeHSDP,
    fitted,
    held,
    ours,
    parallelize,
    same,
    trainer,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from worlds import ALL_GATHER, REDUCE_SCATTER

from lightning_dist import AsyncCheckpoint, CommProfiler, OneBitAdam
from lightning_dist.fabric import CompressedModelParallelStrategy as CompressedFabric
from lightning_dist.profiling.run import read_run
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.sync.fsdp.private import collectives_of, parameter_groups_of

pytestmark = [pytest.mark.slow, pytest.mark.on_ranks(4, hosts=2)]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
QUANTISED: dict[str, Any] = {"codec": "qsgd:bits=4,block_size=64", "parameters": "int8"}
FED_BACK: dict[str, Any] = {"codec": "int4", "parameters": "int8", "error_feedback": True}
"""Of one replica of all ranks: random rounding, and errors."""


@pytest.mark.parametrize(
    "how",
    [{}, pytest.param({"mp_policy": BF16}, marks=pytest.mark.exhaustive)],
    ids=["fp32", "bf16"],
)
def test_uncompressed_it_has_the_bits_of_torch(how: dict[str, Any]) -> None:
    """Of HSDP under Lightning's own strategy, with clipping and accumulation."""
    given = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    native = NativeHSDP(data_parallel_size=4, tensor_parallel_size=1)
    _, expected = fitted(native, Module(native=True, **how), **given)
    _, got = fitted(ours("none"), Module(**how), **given)
    assert same(weights(expected), weights(got))
    assert expected.losses == got.losses


def test_mesh_samplers_and_bytes_and_a_second_fit_goes_on() -> None:
    logger = Memory()
    found, module = fitted(ours(), logger=logger, log_every_n_steps=1)
    strategy: Any = found.strategy
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": dist.get_rank()}
    mesh = dict(zip(module.device_mesh.mesh_dim_names, module.device_mesh.shape, strict=True))
    assert mesh == {"replicate": 2, "data_parallel": 2, "tensor_parallel": 1}
    assert strategy.topology.by_node() == ((0, 1), (2, 3))
    assert "int8" in strategy.comm_config()["codec"].lower()
    stats = strategy.comm_stats()
    assert stats["steps"] == 8
    assert stats["inter_bytes"] == stats["wire_bytes"] < 0.4 * stats["raw_bytes"]
    assert logger.metrics["comm/total_wire_bytes"] == stats["wire_bytes"]
    assert held(strategy)
    found.fit_loop.max_epochs = 3
    found.fit(module)
    assert replicas_are_equal(module, module.device_mesh)
    assert strategy.sync.reducer.step == 12, "with the residuals of the first"
    assert type(trainer("compressed_model_parallel").strategy) is type(strategy)


def test_reducers_know_of_the_grad_scaler_in_use() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    found, _ = fitted(ours(), plugins=[precision], max_steps=1)
    assert found.strategy.sync.reducer.has_grad_scaler
    strategy = under_fabric("int8")
    FabricRun(strategy, plugins=[FabricMixedPrecision("16-mixed", "cpu", scaler=scaler)])
    (reducer,) = strategy.reducers
    assert reducer.has_grad_scaler


def require_resumed(path: Path, **given: Any) -> L.Trainer:
    """A fit that goes on from a checkpoint is as one that does it in one go; returns the first."""
    _, straight = fitted(ours("int4", **given))
    first, _ = fitted(ours("int4", **given), max_epochs=1)
    first.save_checkpoint(path)
    second, again = fitted(ours("int4", **given), ckpt_path=path)
    assert same(weights(straight), weights(again))
    assert second.strategy.sync.reducer.step == 2 * second.num_training_batches, "both epochs"
    assert any(part.any() for part in held(second.strategy))
    return first


def test_a_resumed_training_is_that_without_a_pause(tmp_path: Path) -> None:
    require_resumed(tmp_path / "checkpoint")


@pytest.mark.exhaustive
def test_it_resumes_from_one_file_which_the_strategy_of_lightning_loads_too(tmp_path: Path) -> None:
    require_resumed(tmp_path / "checkpoint", save_distributed_checkpoint=False)
    native = NativeHSDP(data_parallel_size=4, tensor_parallel_size=1)
    plain, _ = fitted(native, Module(native=True), ckpt_path=tmp_path / "checkpoint")
    assert plain.global_step == 2 * BATCHES


@pytest.mark.exhaustive
def test_tensor_parallel_ranks_resume_and_residuals_of_parts_go_on(tmp_path: Path) -> None:
    first = require_resumed(tmp_path / "checkpoint", tensor_parallel_size=2)
    whole, _ = fitted(ours("int4"), ckpt_path=tmp_path / "checkpoint")
    steps = first.num_training_batches + BATCHES  # each epoch with its own number of ranks
    assert whole.strategy.sync.reducer.step == steps


def test_tensor_parallel_ranks_get_the_same_data() -> None:
    found, module = fitted(ours(tensor_parallel_size=2))
    assert replicas_are_equal(module, module.device_mesh)
    sampler = found.strategy.distributed_sampler_kwargs
    assert sampler == {"num_replicas": 2, "rank": dist.get_rank() // 2}


def test_a_validation_compresses_nothing() -> None:
    found = trainer(ours(), limit_val_batches=1)
    found.validate(Module(), verbose=False)
    assert found.strategy.comm_stats() == {}


def test_one_replica_trains_as_fsdp_does() -> None:
    alone, module = fitted(ours(replicate_size=1))
    _, native = fitted(ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1))
    assert same(weights(module), weights(native))
    assert alone.strategy.comm_stats() == {}


def test_parameters_and_gradients_of_one_replica_are_quantised() -> None:
    """It trains as under the strategy of Lightning."""
    plain = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
    _, expected = fitted(plain, accumulate_grad_batches=2)
    for codec, parameters in (("none", "none"), ("qsgd:bits=8,block_size=64", "int8")):
        strategy, logger = ours(codec, parameters=parameters), Memory()
        _, got = fitted(strategy, accumulate_grad_batches=2, logger=logger, log_every_n_steps=1)
        far = 1e-5 if codec == "none" else 0.02
        for a, b in zip(expected.losses, got.losses, strict=True):
            assert abs(a - b) < far * a, codec
        stats = strategy.comm_stats()
        assert stats["ratio"] == 1 if codec == "none" else stats["ratio"] > 2
        assert logger.metrics["comm/total_wire_bytes"] == stats["wire_bytes"]
        assert stats["steps"] == len(got.losses), "of each micro-batch"
        said = strategy.comm_config()["parameters"].lower()
        assert ("int8" in said) == (parameters == "int8")
        assert not strategy.reducers


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [QUANTISED, FED_BACK], ids=["random", "errors"])
def test_random_rounding_and_errors_go_on(settings: dict[str, Any], tmp_path: Path) -> None:
    """From checkpoints of Lightning and AsyncCheckpoint; replicas load them too."""
    _, straight = fitted(ours(**settings))
    saved = AsyncCheckpoint(tmp_path, format="sharded", filename="async")
    given = {"max_epochs": 1, "enable_checkpointing": True, "callbacks": [saved]}
    first, _ = fitted(ours(**settings), **given)
    first.save_checkpoint(tmp_path / "theirs")
    for name in ("async.ckpt", "theirs"):
        _, again = fitted(ours(**settings), ckpt_path=tmp_path / name)
        assert same(weights(straight), weights(again)), name
    other, _ = fitted(ours("int4"), ckpt_path=tmp_path / "theirs")
    assert other.strategy.sync.reducer.step == BATCHES


def count_collectives(patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that this rank sends in each collective of FSDP itself."""
    sent: list[int] = []
    for name in (ALL_GATHER, REDUCE_SCATTER):
        plain = getattr(dist, name)

        def call(
            output: Any, input: Any, *, plain: Any = plain, group: Any = None, **how: Any
        ) -> Any:
            if output.dtype == torch.float32:  # ours are bytes
                sent.append((group.size() - 1) * min(output.nbytes, input.nbytes))
            return plain(output, input, group=group, **how)

        patch.setattr(dist, name, call)
    return sent


def test_the_profiler_sees_both_dimensions(tmp_path: Path) -> None:
    """And changes no bits; rank 0 has the summary of all."""
    found, plain = fitted(ours(), accumulate_grad_batches=2)
    assert found.strategy.comm_stats()["steps"] == found.global_step == 4
    profiler = CommProfiler(dirpath=tmp_path, measure_links=False, print_summary=False)
    with pytest.MonkeyPatch.context() as patch:
        given = count_collectives(patch)
        _, module = fitted(ours(), callbacks=[profiler], accumulate_grad_batches=2)
    assert same(weights(plain), weights(module))
    for block in module.blocks:
        for each in collectives_of(*parameter_groups_of(block)):
            assert type(each).__module__.partition(".")[0] == "torch", "given back"
    summary = profiler.summary
    assert (summary is None) == (dist.get_rank() > 0)
    if summary is None:
        return
    assert summary.steps + summary.warmup_steps == 4, "of two micro-batches"
    assert len(summary.buckets) == 2
    traffic, parts = summary.traffic, summary.breakdown_ms
    assert traffic.wire_bytes == traffic.inter_bytes + traffic.intra_bytes
    assert traffic.inter_bytes > 0
    assert len(given) == 4 * 2 * (2 + 2 + 2), "two gathers and a reduction, of two blocks"
    assert traffic.intra_bytes == sum(given) / 4, "a step"
    assert 0 < summary.exposed_fsdp_ms < summary.exposed_ms
    assert parts["other"] >= 0
    assert sum(parts.values()) == pytest.approx(summary.detailed_step_ms)
    assert parts["exposed_transfer"] > 0
    assert sorted(each.rank for each in summary.ranks) == [0, 1, 2, 3]
    assert summary.errors
    assert "shorter than" in summary.unavailable["predictions"]
    assert profiler.folder is not None
    observed = observe(read_run(profiler.folder))
    assert (observed.scenario.form, observed.scenario.counts) == ("fsdp", (2, 2))
    assert observed.elements == pytest.approx(2 * 675, rel=0.01), "of a shard, of two blocks"


def on_unequal_hosts() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_DIST_HOSTNAME", f"host{dist.get_rank() // 3}")
        return fitted(ours())


def test_what_cannot_work_is_refused() -> None:
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    half = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    one_bit = partial(OneBitAdam, freeze_step=2)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("CPUOffloadPolicy", lambda: fitted(ours(), Module(**offload))),
        ("reduce_dtype", lambda: fitted(ours(), Module(**half))),
        ("call it with mesh", lambda: fitted(ours(), Module(native=True))),
        (
            "keep parameters in bfloat16 or float32",
            lambda: fitted(ours(), precision="16-true"),
        ),
        ("replicate_size * data_parallel_size", lambda: fitted(ours(replicate_size=3))),
        ("got 2 nodes with 3, 1 ranks", on_unequal_hosts),
        ("use torch.optim.AdamW", lambda: fitted(ours(), Module(optimizer=one_bit))),
        ("has its own", lambda: fitted(ours("dgc"))),
        ("sharded over all ranks", lambda: ours("qsgd", parameters="int8", replicate_size=2)),
        ("an unbiased codec", lambda: ours("int8", parameters="int8")),
        (
            "leave start_step and state_update out",
            lambda: ours("qsgd", parameters="int8", start_step=2),
        ),
    ]
    for says, case in cases:
        with pytest.raises((ValueError, TypeError), match=re.escape(says)):
            case()


def under_fabric(codec: str, **given: Any) -> CompressedFabric:
    return CompressedFabric(parallelize, codec, min_compress_numel=0, **given)


def test_uncompressed_it_has_the_bits_of_torch_under_fabric() -> None:
    def hsdp(net: nn.Module, _: DeviceMesh) -> nn.Module:
        return parallelize(net, {"data_parallel": mesh_of(2, 2)})

    native = FabricModelParallel(hsdp, data_parallel_size=4, tensor_parallel_size=1)
    expected = FabricRun(native, micro_batches=2).train(3, native=True)
    assert all(map(same, expected, FabricRun(under_fabric("none"), micro_batches=2).train(3)))


@pytest.mark.parametrize("settings", [{"codec": "int4"}, QUANTISED], ids=["replicas", "one"])
def test_a_run_under_fabric_goes_on_from_a_checkpoint(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    straight, first, second = (
        FabricRun(under_fabric(**settings), micro_batches=2) for _ in range(3)
    )
    whole = straight.train(4)
    first.train(2)
    first.fabric.save(tmp_path / "fabric", first.state)
    second.train(1)  # what it owes is forgotten
    second.fabric.load(tmp_path / "fabric", second.state)
    (stats,) = second.fabric.strategy.comm_stats()
    assert same(whole[-1], second.train(2)[-1])
    if settings == QUANTISED:
        assert stats["ratio"] > 2
    else:
        assert stats["inter_bytes"] < 0.3 * stats["raw_bytes"]
        assert second.fabric.strategy.topology.by_node() == ((0, 1), (2, 3))
