"""Strategies with wrong arguments or elsewhere, and names that do not exist."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from processes import run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_dist import (
    AsyncCheckpoint,
    CompressedDDPStrategy,
    CompressedModelParallelStrategy,
    ElasticRestart,
    LocalUpdateModelParallelStrategy,
    LocalUpdateStrategy,
    TopK,
    compress_ddp,
    compress_fsdp,
    local_updates,
)
from lightning_dist.codecs import resolve_codec
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from lightning_dist.fabric import LocalUpdateModelParallelStrategy as FabricLocalUpdates


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"block_size": 64}, "write codec='int8:block_size=64'"),
        ({"replicate": 2}, "did you mean 'replicate_size'"),
        ({"replicate_size": 0}, "above 0, got 0"),
        ({"tensor_parallel_size": "auto"}, "got 'auto'"),
        ({"tensor_parallel_size": 2, "recovery": "in_process"}, "each keeps a part of it"),
        ({"codec": {"intra": "bf16", "inter": "int8"}}, "the codec between replicas alone"),
    ],
)
def test_arguments_of_sharded_models(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        CompressedModelParallelStrategy(**{"codec": "int8", **arguments})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"replicas": "host"}, "all ranks of a host are one worker; leave it out"),
        ({"method": "post_local_sgd", "ddp_steps": 9}, "got ddp_steps=9; leave it out"),
        ({"tensor_parallel_size": 2}, "got tensor_parallel_size=2; leave it out"),
        ({"parameters": "int8"}, "parameters='int8' has no effect on local updates of a sharded"),
        ({"hierarchical": True}, "each rank exchanges its shard; leave it out"),
        ({"rank_groups": [[0, 1], [2]]}, "replicate_size is the number of workers"),
        ({"ranks_per_host": 2}, "replicate_size is the number of workers"),
        ({"commit": "deferred"}, "commit='deferred' has no effect"),
        ({"compile_kernels": True}, "compile nothing, so leave it out"),
        ({"recovery": "in_process"}, "each keeps a part of it"),
        ({"data_parallel_size": 0}, "above 0, got 0"),
        ({"method": "dilocco"}, "did you mean 'diloco'"),
        ({"block_size": 64}, "write codec='int8:block_size=64'"),
        ({"sync_evry": 4}, "did you mean 'sync_every'"),
        ({"codec": {"intra": "bf16", "inter": "int8"}}, "give the codec between replicas alone"),
    ],
)
def test_arguments_of_local_steps_of_sharded_models(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        LocalUpdateModelParallelStrategy(**arguments)
    with pytest.raises(ValueError, match=re.escape(says)):
        FabricLocalUpdates(lambda model, _: model, **arguments)


OTHER_PACKAGE = """
import json, sys
import lightning_dist, pytorch_lightning, lightning_fabric
from lightning_dist import CompressedDDPStrategy
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
said = []
objects = CompressedDDPStrategy(), FabricStrategy()
for strategy in ("compressed_ddp", "compressed_ddp_int4", *objects):
    for make in (pytorch_lightning.Trainer, lightning_fabric.Fabric):
        try:
            make(strategy=strategy, accelerator="cpu", devices=1)
        except ValueError as error:
            said.append(str(error))
print("SAID" + json.dumps(said))
"""


def test_a_trainer_or_fabric_of_the_other_package(quick_python: list[str]) -> None:
    """The names and both classes, under pytorch_lightning and lightning_fabric."""
    pytest.importorskip("pytorch_lightning")
    done = run([*quick_python, "-c", OTHER_PACKAGE], limit=90).require_success()
    said = json.loads(done.output.split("SAID")[1].splitlines()[0])
    expected = [
        f"lightning_dist works with the package 'lightning', and this {kind} comes from "
        f"{package!r}, whose classes are different ones; write 'import lightning as L', not "
        "'import pytorch_lightning'"
        for kind, package in (("Trainer", "pytorch_lightning"), ("Fabric", "lightning_fabric"))
    ]
    assert said == expected * 4


STRATEGIES = pytest.mark.parametrize("strategy", [CompressedDDPStrategy, FabricStrategy])


def message(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the callers compare the whole text)
        call(*args, **kwargs)
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("int-8", "'int8'"),
        ("INT8", "'int8'"),
        ("int3", "'int8' or 'int4'"),
        ("int-8:block_size=64", "'int8:block_size=64'"),
        ("power_sgd", "'powersgd'"),
        ("top-k:ratio=0.01", "'topk:ratio=0.01'"),
        ("bfloat16", "'bf16'"),
    ],
)
def test_a_codec_that_does_not_exist(given: str, meant: str) -> None:
    assert message(resolve_codec, given).endswith(f", got {given!r}; did you mean {meant}?")


@pytest.mark.parametrize("given", ["zstd", "", 8, None])
def test_a_codec_that_is_like_no_other(given: Any) -> None:
    assert message(resolve_codec, given).endswith(f"(block_size=128), got {given!r}")


@STRATEGIES
@pytest.mark.parametrize(
    ("codec", "arguments", "meant"),
    [
        ("topk", {"ratio": 0.01}, "codec='topk:ratio=0.01'"),
        ("topk:block_size=1024", {"ratio": 0.01}, "codec='topk:block_size=1024,ratio=0.01'"),
        ("int8", {"block_size": 128}, "codec='int8:block_size=128'"),
        ("int8", {"rank": 2}, "codec='powersgd:rank=2'"),
        (TopK(), {"ratio": 0.01}, "codec=TopK(ratio=0.01)"),
    ],
)
def test_an_option_of_the_codec_given_to_the_strategy(
    strategy: Any, codec: Any, arguments: dict[str, Any], meant: str
) -> None:
    (name,) = arguments
    assert message(strategy, codec, **arguments) == (
        f"Unknown setting {name!r} in CompressedDDPStrategy: it is an option of the codec, write "
        f"{meant}"
    )


def test_an_option_of_the_codec_given_to_the_plugin() -> None:
    plugin = pytest.importorskip("lightning_dist.accelerate").CompressedDDPPlugin
    told = "Unknown setting 'ratio' in CompressedDDPPlugin: it is an option of the codec, write "
    assert message(plugin, "topk", ratio=0.01) == f"{told}codec='topk:ratio=0.01'"
    assert message(plugin, codec="topk", ratio=0.01) == f"{told}codec='topk:ratio=0.01'"


OF_DDP = "it is an argument of DistributedDataParallel, give it there"


@pytest.mark.parametrize(
    ("function", "given", "remedy"),
    [
        (compress_ddp, {"compression": "int8"}, "did you mean 'codec'?"),
        (compress_ddp, {"bucket_cap_mb": 5}, OF_DDP),
        (
            compress_ddp,
            {"codec": "topk", "ratio": 0.1},
            "it is an option of the codec, write codec='topk:ratio=0.1'",
        ),
        (compress_fsdp, {"compression": "int8"}, "did you mean 'codec'?"),
        (
            compress_fsdp,
            {"reshard_after_forward": True},
            "it is an argument of fully_shard, give it there",
        ),
        (local_updates, {"sync_each": 4}, "did you mean 'sync_every'?"),
        (local_updates, {"process_group": None}, OF_DDP),
    ],
)
def test_an_argument_that_a_function_does_not_have(
    function: Callable[..., object], given: dict[str, Any], remedy: str
) -> None:
    wrong = [*given][-1]
    assert message(function, nn.Linear(2, 2), **given) == (
        f"Unknown setting {wrong!r} in {function.__name__}: {remedy}"
    )


def test_the_word_of_other_packages_for_a_codec() -> None:
    of_updates = LocalUpdateStrategy, LocalUpdateModelParallelStrategy
    for strategy in (CompressedDDPStrategy, FabricStrategy, *of_updates):
        assert message(strategy, compression="int8") == (
            f"Unknown setting 'compression' in {strategy.__name__}: did you mean 'codec'?"
        )


@pytest.mark.parametrize("callback", [ElasticRestart, AsyncCheckpoint])
def test_a_callback_names_itself_and_what_was_meant(callback: type, tmp_path: Path) -> None:
    assert message(callback, tmp_path, every_n_steps=5) == (
        f"Unknown setting 'every_n_steps' in {callback.__name__}: did you mean "
        "'every_n_train_steps'?"
    )


def test_a_name_like_no_other_lists_those_of_this_package_first() -> None:
    assert message(LocalUpdateStrategy, zebra=1) == (
        "Unknown setting 'zebra' in LocalUpdateStrategy: valid names: evaluate, method, "
        "sync_every, fragments, overlap_steps, mixing, ddp_steps, outer_lr, outer_momentum, "
        "outer_optimizer, outer_schedule, replicas, offload, weigh_by, codec, error_feedback, "
        "hierarchical, min_compress_numel, start_step, compile_kernels, ranks_per_host, "
        "rank_groups, commit, delay, exchange_timeout, recovery, mirror_residuals, and those of "
        "DDPStrategy"
    )
    assert message(LocalUpdateModelParallelStrategy, zebra=1) == (
        "Unknown setting 'zebra' in LocalUpdateModelParallelStrategy: valid names: evaluate, "
        "replicate_size, error_feedback, min_compress_numel, exchange_timeout, method, sync_every, "
        "fragments, overlap_steps, mixing, ddp_steps, outer_lr, outer_momentum, outer_optimizer, "
        "outer_schedule, replicas, offload, weigh_by, codec, and those of ModelParallelStrategy"
    )
    assert message(LocalUpdateStrategy, find_unused=True).endswith(
        "did you mean 'find_unused_parameters'?"  # an argument of DDP
    )


def test_a_sharded_model_takes_local_steps_with_another_strategy() -> None:
    assert message(CompressedModelParallelStrategy, method="diloco", sync_every=16) == (
        "CompressedModelParallelStrategy exchanges gradients in every step and takes no local "
        "ones, got method, sync_every; use LocalUpdateModelParallelStrategy"
    )


@STRATEGIES
@pytest.mark.parametrize("value", ["fifty", "50", -1, True, float("nan")])
def test_buckets_of_a_size_that_is_none(strategy: Any, value: Any) -> None:
    """A string would be repeated a million times by DDP, which multiplies it."""
    assert message(strategy, bucket_cap_mb=value) == (
        f"bucket_cap_mb must be a number of MiB above 0, got {value!r}; DDP's default is 25"
    )


@STRATEGIES
@pytest.mark.parametrize("value", [None, 1, 0.5, 50])
def test_buckets_of_a_size_that_is_one(strategy: Any, value: Any) -> None:
    assert strategy(bucket_cap_mb=value)._ddp_kwargs == {"bucket_cap_mb": value}


BAD: list[tuple[Mapping[str, Any], str]] = [
    ({"codec": "int9"}, "codec must be one of 'none', 'fp16', 'bf16', 'int8', .* got 'int9'"),
    ({"codec": 8}, "codec must be one of .* got 8"),
    ({"codec": None}, "codec must be one of .* got None"),
    ({"error_feedback": "yes"}, "error_feedback must be True, False or 'auto', got 'yes'"),
    ({"hierarchical": 2}, "hierarchical must be 'auto', True, False or 'leader', got 2"),
    ({"ranks_per_host": 0}, "ranks_per_host must be 1 or more ranks, got 0"),
    ({"rank_groups": [0, 1]}, r"rank_groups must be groups of ranks .* got \[0, 1\]"),
    ({"min_compress_numel": -1}, "min_compress_numel must be 0 .* got -1"),
    ({"start_step": -5}, "start_step must be 0 or more synchronised steps, got -5"),
    ({"compile_kernels": "always"}, "compile_kernels must be .* got 'always'"),
    ({"ddp_comm_hook": fp16_compress_hook}, "one communication hook .* got ddp_comm_hook="),
    ({"ddp_comm_state": object()}, "one communication hook .* got ddp_comm_state="),
    ({"ddp_comm_wrapper": fp16_compress_hook}, "one communication hook .* ddp_comm_wrapper="),
    ({"model_averaging_period": 4}, "one communication hook .* model_averaging_period=4"),
    ({"mixed_precision": object()}, "mixed_precision= installs .* use precision='bf16-mixed'"),
    ({"codek": "int8"}, "'codek' in CompressedDDPStrategy: did you mean 'codec'"),
    ({"bucket_cap": 5}, "'bucket_cap' in CompressedDDPStrategy: did you mean 'bucket_cap_mb'"),
    ({"module": None}, "'module' in .*: valid names: codec, .*, and those of DDPStrategy$"),
]


@pytest.mark.parametrize("strategy", [CompressedDDPStrategy, FabricStrategy])
@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[next(iter(bad)) for bad, _ in BAD])
def test_a_strategy_refuses(
    strategy: Callable[..., Any], arguments: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        strategy(**arguments)
    assert not dist.is_initialized()


@pytest.mark.parametrize("strategy", [CompressedDDPStrategy, FabricStrategy])
def test_a_strategy_takes_what_is_ddps_or_its_subclass(strategy: type) -> None:
    class Mine(strategy):
        def __init__(self, mine: int, **others: Any) -> None:
            super().__init__(**others)

    made = Mine(mine=3, codec="int4", bucket_cap_mb=5, start_method="fork", static_graph=True)
    assert made._ddp_kwargs["bucket_cap_mb"] == 5
    with pytest.raises(ValueError, match=r"'mime' in Mine: did you mean 'mine'\?"):
        Mine(mine=3, mime=4)


def of_pytorch_lightning(name: str, package: str = "pytorch_lightning") -> Any:
    """An object as that package would make it; it need not be installed."""
    return type(name, (), {"__module__": f"{package}.somewhere"})()


def test_a_module_of_pytorch_lightning() -> None:
    strategy = CompressedDDPStrategy()
    with pytest.raises(ValueError, match=r"model \(Net\) comes from 'pytorch_lightning'"):
        strategy.connect(of_pytorch_lightning("Net"))


def test_a_subclass_in_the_users_own_module_of_a_class_of_pytorch_lightning() -> None:
    base = type(of_pytorch_lightning("LightningModule"))
    mine = type("Mine", (base,), {"__module__": "my_project.models"})()
    with pytest.raises(ValueError, match="write 'import lightning as L'"):
        CompressedDDPStrategy().connect(mine)


def test_a_callback_of_pytorch_lightning() -> None:
    class Trainer:
        callbacks = (Callback(), of_pytorch_lightning("EarlyStopping"))

    with pytest.raises(ValueError, match=r"callback \(EarlyStopping\) comes from"):
        CompressedDDPStrategy().setup(Trainer())


@pytest.mark.parametrize("strategy", [CompressedDDPStrategy, FabricStrategy])
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning_fabric"])
def test_a_plugin_of_pytorch_lightning(strategy: Callable[..., Any], package: str) -> None:
    """Its environments, IO plugins and precisions live in its other half, lightning_fabric."""
    with pytest.raises(ValueError, match=r"checkpoint_io \(TorchCheckpointIO\) comes from"):
        strategy(checkpoint_io=of_pytorch_lightning("TorchCheckpointIO", package))


def test_an_exception_on_its_way_out_keeps_its_arguments() -> None:
    """Only the message that names DDP's own strategy is changed."""
    error = ValueError("of the user", 42)
    CompressedDDPStrategy().on_exception(error)
    assert error.args == ("of the user", 42)
