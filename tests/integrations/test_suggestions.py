"""A name that does not exist is answered with the one that was meant. Messages are tested whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

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
