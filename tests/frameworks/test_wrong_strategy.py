"""Strategies with wrong arguments or elsewhere, and names that do not exist."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from messages import message
from needs import needs
from processes import run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_dist import (
    AsyncCheckpoint,
    CommProfiler,
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
from lightning_dist.accelerate import CompressedDDPPlugin
from lightning_dist.base.features import RECOVERY
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
        pytest.param(
            {"tensor_parallel_size": 2, "recovery": "in_process"},
            "each keeps a part of it",
            marks=needs(RECOVERY),
        ),
        ({"codec": {"intra": "bf16", "inter": "int8"}}, "the codec between replicas alone"),
    ],
)
def test_arguments_of_sharded_models(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        CompressedModelParallelStrategy(**{"codec": "int8", **arguments})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"replicas": "node"}, "all ranks of a node are one worker; leave it out"),
        ({"method": "post_local_sgd", "ddp_steps": 9}, "got ddp_steps=9; leave it out"),
        ({"tensor_parallel_size": 2}, "got tensor_parallel_size=2; leave it out"),
        (
            {"parameters": "int8"},
            "cannot take effect under local updates of a sharded model, got 'int8'",
        ),
        ({"hierarchical": True}, "each rank exchanges its shard; leave it out"),
        ({"rank_groups": [[0, 1], [2]]}, "replicate_size is the number of workers"),
        ({"ranks_per_node": 2}, "replicate_size is the number of workers"),
        ({"state_update": "deferred"}, "got 'deferred'; there is no step to undo"),
        ({"compile_kernels": True}, "compile nothing, so leave it out"),
        pytest.param({"recovery": "in_process"}, "each keeps a part of it", marks=needs(RECOVERY)),
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
    assert said[:4] == expected * 2
    for refused, kind in zip(said[4:], ("Trainer", "Trainer", "Fabric", "Fabric"), strict=True):
        assert f"for the {kind} of the package 'lightning'" in refused


@pytest.mark.parametrize(
    ("make", "strategy", "said"),
    [
        (Trainer, FabricStrategy, "a Trainer takes the one of 'from lightning_dist import Compres"),
        (Fabric, CompressedDDPStrategy, "a Fabric takes the one of 'from lightning_dist.fabric i"),
        (Fabric, LocalUpdateStrategy, "'from lightning_dist.fabric import LocalUpdateStrategy'"),
    ],
)
def test_the_class_of_the_other_framework(make: Any, strategy: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make(strategy=strategy(), accelerator="cpu", devices=1)


@pytest.mark.parametrize("make", [CommProfiler, AsyncCheckpoint, partial(ElasticRestart, "ckpt")])
def test_a_callback_in_a_trainer_of_the_other_package(make: Any) -> None:
    """Which calls the hooks of any object."""
    foreign: Any = type("Trainer", (), {"__module__": "pytorch_lightning.trainer.trainer"})()
    with pytest.raises(ValueError, match=r"\(Trainer\) comes from 'pytorch_lightning'"):
        make().setup(foreign, LightningModule(), "fit")


STRATEGIES = pytest.mark.parametrize("strategy", [CompressedDDPStrategy, FabricStrategy])


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


@pytest.mark.parametrize("owner", [CompressedDDPStrategy, FabricStrategy, CompressedDDPPlugin])
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
def test_an_option_of_the_codec_given_to_its_owner(
    owner: type, codec: Any, arguments: dict[str, Any], meant: str
) -> None:
    (name,) = arguments
    assert message(owner, codec, **arguments) == (
        f"Unknown setting {name!r} in {owner.__name__}: it is an option of the codec, write {meant}"
    )
    assert message(owner, codec=codec, **arguments).endswith(f"write {meant}")


CODEC = {"compression": "int8"}, "did you mean 'codec'?"  # the word of other packages
EVERY = {"dirpath": "here", "every_n_steps": 5}, "did you mean 'every_n_train_steps'?"
OF_DDP = "it is an argument of DistributedDataParallel, give it there"
OPTION = "it is an option of the codec, write codec='topk:ratio=0.1'"
OF_FSDP = "it is an argument of fully_shard, give it there"
LOCAL = (
    "valid names: method, sync_every, fragments, overlap_steps, mixing, "
    "ddp_steps, outer_lr, outer_momentum, weigh_by, offload, outer_optimizer, outer_schedule, "
    "codec, error_feedback, hierarchical, ranks_per_node, rank_groups, min_compress_numel, "
    "exchange_timeout, replicas, evaluate, recovery, mirror_residuals, and those of DDPStrategy"
)
LOCAL_SHARDED = (
    "valid names: method, sync_every, fragments, overlap_steps, mixing, "
    "ddp_steps, outer_lr, outer_momentum, weigh_by, offload, outer_optimizer, outer_schedule, "
    "codec, error_feedback, min_compress_numel, exchange_timeout, replicas, evaluate, "
    "replicate_size, and those of ModelParallelStrategy"
)


@pytest.mark.parametrize(
    ("owner", "given", "remedy"),
    [
        (compress_ddp, *CODEC),
        (compress_ddp, {"bucket_cap_mb": 5}, OF_DDP),
        (compress_ddp, {"codec": "topk", "ratio": 0.1}, OPTION),
        (compress_fsdp, *CODEC),
        (compress_fsdp, {"reshard_after_forward": True}, OF_FSDP),
        (local_updates, {"sync_each": 4}, "did you mean 'sync_every'?"),
        (local_updates, {"process_group": None}, OF_DDP),
        (CompressedDDPStrategy, *CODEC),
        (CompressedDDPStrategy, {"bucket_cap": 5}, "did you mean 'bucket_cap_mb'?"),
        (FabricStrategy, *CODEC),
        (FabricStrategy, {"bucket_cap": 5}, "did you mean 'bucket_cap_mb'?"),
        (LocalUpdateStrategy, *CODEC),
        (LocalUpdateStrategy, {"zebra": 1}, LOCAL),
        (LocalUpdateStrategy, {"find_unused": True}, "did you mean 'find_unused_parameters'?"),
        (LocalUpdateModelParallelStrategy, *CODEC),
        (LocalUpdateModelParallelStrategy, {"zebra": 1}, LOCAL_SHARDED),
        (ElasticRestart, *EVERY),
        (AsyncCheckpoint, *EVERY),
    ],
)
def test_a_name_that_is_no_setting(
    owner: Callable[..., object], given: dict[str, Any], remedy: str
) -> None:
    """Those of this package are listed first where none is like it."""
    model = () if isinstance(owner, type) else (nn.Linear(2, 2),)
    assert message(owner, *model, **given) == (
        f"Unknown setting {[*given][-1]!r} in {owner.__name__}: {remedy}"
    )


def test_a_sharded_model_takes_local_steps_with_another_strategy() -> None:
    assert message(CompressedModelParallelStrategy, sync_every=16) == (
        "sync_every is a setting of local updates and cannot take effect under FSDP2, got 16; use "
        "a LocalUpdateModelParallelStrategy or local_updates"
    )


@STRATEGIES
def test_buckets_have_a_size_that_is_a_number_above_0(strategy: Any) -> None:
    """A string would be repeated a million times by DDP, which multiplies it."""
    for value in ("fifty", "50", -1, True, float("nan")):
        assert message(strategy, bucket_cap_mb=value) == (
            f"bucket_cap_mb must be a number of MiB above 0, got {value!r}; DDP's default is 25"
        )
    for size in (None, 1, 0.5, 50):
        assert strategy(bucket_cap_mb=size)._ddp_kwargs == {"bucket_cap_mb": size}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"codec": "int9"}, "codec must be one of 'none', 'fp16', 'bf16', 'int8', .* got 'int9'"),
    ({"codec": {"by_size": "int8"}}, "A policy is a mapping from one of by_size, by_name, .* got"),
    (
        {"codec": {"by_size": {"codec": "int8", "numel": 9}}},
        "by_size takes codec, min_numel, got {'codec': 'int8', 'numel': 9}: .* 'numel'",
    ),
    ({"codec": {"warmup": {"1": "int8"}}}, "warmup: steps must be whole numbers that start at 0"),
    ({"codec": {"by_sizes": {}}}, r"got the keys \['by_sizes'\]; policies are by_size, by_name"),
    (
        {"codec": "topk:values=fp64"},
        "topk: values must be 'bf16', 'fp32', 'int8' or 'int2', got 'fp64'",
    ),
    ({"codec": "threshold:tau=0"}, r"threshold: tau must be a positive number, got 0\.0; 3"),
    ({"codec": "powersgd:rank=0"}, "powersgd: rank must be a whole number from 1 to 1024, got 0"),
    ({"codec": "dgc:momentum=1"}, "dgc: momentum must be a number from 0 to below 1, got 1.0"),
    (
        {"codec": "terngrad", "error_feedback": True},
        "Error feedback diverges with codec terngrad.* leave error_feedback at 'auto'",
    ),
    (
        {"codec": "randomk:unbiased=true", "error_feedback": True},
        "Error feedback diverges with codec randomk.* leave error_feedback at 'auto'",
    ),
    (
        {"codec": "dgc", "error_feedback": False},
        "codec 'dgc' accumulates its momentum in error feedback .* or use 'topk'",
    ),
    ({"error_feedback": "yes"}, "error_feedback must be True, False or 'auto', got 'yes'$"),
    ({"hierarchical": 2}, "hierarchical must be 'auto', True, False or 'leader', got 2"),
    (
        {"ranks_per_node": 0},
        r"ranks_per_node must be 1 or more ranks, or None \(by host name\), got 0",
    ),
    ({"rank_groups": [0, 1]}, r"rank_groups must be groups of ranks, .* got \[0, 1\]"),
    (
        {"min_compress_numel": -1},
        r"min_compress_numel must be 0 or more elements \(0 compresses all tensors\), .* got -1$",
    ),
    ({"start_step": -5}, "start_step must be 0 or more synchronised steps, got -5$"),
    ({"compile_kernels": "always"}, "compile_kernels must be True, False or 'auto', got 'always'$"),
    ({"ddp_comm_hook": fp16_compress_hook}, "one communication hook .* got ddp_comm_hook="),
    ({"ddp_comm_state": object()}, "one communication hook .* got ddp_comm_state="),
    ({"ddp_comm_wrapper": fp16_compress_hook}, "one communication hook .* ddp_comm_wrapper="),
    ({"model_averaging_period": 4}, "one communication hook .* model_averaging_period=4"),
    ({"mixed_precision": object()}, "mixed_precision= installs .* use precision='bf16-mixed'"),
    ({"module": None}, "'module' in .*: valid names: codec, .*, and those of DDPStrategy$"),
]


@STRATEGIES
@pytest.mark.parametrize(("arguments", "says"), BAD, ids=[" ".join(bad) for bad, _ in BAD])
def test_a_strategy_refuses(strategy: Any, arguments: dict[str, Any], says: str) -> None:
    """Before any process group exists."""
    with pytest.raises(ValueError, match=says):
        strategy(**arguments)
    assert not dist.is_initialized()


@STRATEGIES
def test_a_strategy_takes_what_is_ddps_or_its_subclass(strategy: type) -> None:
    class Mine(strategy):
        def __init__(self, mine: int, **others: Any) -> None:
            super().__init__(**others)

    made = Mine(mine=3, codec="int4", bucket_cap_mb=5, start_method="fork", static_graph=True)
    assert made._ddp_kwargs["bucket_cap_mb"] == 5
    assert message(Mine, mine=3, mime=4).endswith("'mime' in Mine: did you mean 'mine'?")


def of_pytorch_lightning(name: str, package: str = "pytorch_lightning") -> Any:
    """An object as that package would make it; it need not be installed."""
    return type(name, (), {"__module__": f"{package}.somewhere"})()


def test_a_module_of_pytorch_lightning_or_of_a_subclass_in_the_users_own_module() -> None:
    theirs = of_pytorch_lightning("Net")
    mine = type("Mine", (type(theirs),), {"__module__": "my_project.models"})()
    for module in (theirs, mine):
        told = message(CompressedDDPStrategy().connect, module)
        assert f"model ({type(module).__name__}) comes from 'pytorch_lightning'" in told
        assert "write 'import lightning as L'" in told


def test_a_callback_of_pytorch_lightning() -> None:
    class Trainer:
        callbacks = (Callback(), of_pytorch_lightning("EarlyStopping"))

    told = message(CompressedDDPStrategy().setup, Trainer())
    assert "callback (EarlyStopping) comes from" in told


@STRATEGIES
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning_fabric"])
def test_a_plugin_of_pytorch_lightning(strategy: Any, package: str) -> None:
    """Its environments, IO plugins and precisions live in its other half, lightning_fabric."""
    told = message(strategy, checkpoint_io=of_pytorch_lightning("TorchCheckpointIO", package))
    assert "checkpoint_io (TorchCheckpointIO) comes from" in told


def test_an_exception_on_its_way_out_keeps_its_arguments() -> None:
    """Only the message that names DDP's own strategy is changed."""
    error = ValueError("of the user", 42)
    CompressedDDPStrategy().on_exception(error)
    assert error.args == ("of the user", 42)
