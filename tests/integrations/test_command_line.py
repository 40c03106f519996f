"""LightningCLI reads strategies, codecs and checkpoints from YAML."""

import re
import sys
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from test_codec_options import OPTIONS
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI

from lightning_dist import (
    BF16,
    AsyncCheckpoint,
    CompressedDDPStrategy,
    CompressedModelParallelStrategy,
    Int8,
    LocalUpdateModelParallelStrategy,
    LocalUpdateStrategy,
    by_name,
    by_size,
    warmup,
)
from lightning_dist.codecs import POLICIES, PowerSGD
from lightning_dist.configuration import resolve
from lightning_dist.configuration.options import POLICIES as POLICIES_OF_FILES
from lightning_dist.settings import Settings

GUIDE = Path(__file__).resolve().parents[2] / "docs/guide.md"


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])


def trainer_from(tmp_path: Path, **given: Any) -> L.Trainer:
    """Of arguments in YAML."""
    config = tmp_path / "config.yaml"
    trainer = {"accelerator": "cpu", "devices": 2, "logger": False, **given}
    config.write_text(yaml.safe_dump({"trainer": trainer}, sort_keys=False))
    arguments = {"run": False, "save_config_callback": None, "args": ["--config", str(config)]}
    return LightningCLI(L.LightningModule, **arguments).trainer


def of_class(path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments}


def strategy_from(tmp_path: Path, kind: type, **arguments: Any) -> Any:
    """By its class path."""
    given = of_class(f"lightning_dist.{kind.__name__}", **arguments)
    strategy = trainer_from(tmp_path, strategy=given).strategy
    assert type(strategy) is kind
    return strategy


def test_by_name(tmp_path: Path) -> None:
    strategy = trainer_from(tmp_path, strategy="compressed_ddp_bf16").strategy
    assert type(strategy) is CompressedDDPStrategy
    assert strategy._settings.codec == BF16()


def test_arguments_of_ours_and_of_ddp(tmp_path: Path) -> None:
    of_ddp = {"bucket_cap_mb": 5, "find_unused_parameters": True}
    of_lightning = {"process_group_backend": "gloo", "timeout": "0:00:40"}
    ours = {"codec": "int8", "error_feedback": False, "hierarchical": "auto"}
    ours |= {"min_compress_numel": 0, "start_step": 10, "compile_kernels": False}
    strategy = strategy_from(tmp_path, CompressedDDPStrategy, **ours, **of_ddp, **of_lightning)
    assert strategy._settings == Settings.check(**ours)
    assert strategy._ddp_kwargs | of_ddp == strategy._ddp_kwargs
    assert strategy._ddp_kwargs["gradient_as_bucket_view"] is False, "the rest: DDP's defaults"
    assert strategy.process_group_backend == "gloo"
    assert strategy._timeout == timedelta(seconds=40)


@pytest.mark.parametrize("text", OPTIONS)
def test_options_of_a_codec_in_the_string(tmp_path: Path, text: str) -> None:
    strategy = strategy_from(tmp_path, CompressedDDPStrategy, codec=text)
    assert strategy._settings.codec == OPTIONS[text]


def test_a_codec_object(tmp_path: Path) -> None:
    codec = of_class("lightning_dist.codecs.PowerSGD", rank=3, two_phase=True)
    strategy = strategy_from(tmp_path, CompressedDDPStrategy, codec=codec)
    assert strategy._settings.codec == PowerSGD(rank=3, two_phase=True)


def test_policies_are_those_of_the_guide(tmp_path: Path) -> None:
    """Here and in the settings file."""
    (written,) = re.findall(r"```yaml\n(codec:.*?)```", GUIDE.read_text(), re.DOTALL)
    large = by_size("int8", min_numel=65536)
    named = by_name("int4", {r"head\.weight": "int8", "embed": "none"})
    expected = warmup({0: "none", 200: large, 1000: named})
    strategy = strategy_from(tmp_path, CompressedDDPStrategy, **yaml.safe_load(written))
    assert strategy._settings.codec == expected
    (tmp_path / "ours.yaml").write_text(written)
    environ = {"LIGHTNING_DIST_CONFIG": str(tmp_path / "ours.yaml"), "HF_HOME": "/"}
    assert Settings.check(**resolve(environ=environ).options).codec == expected
    assert set(POLICIES) == set(POLICIES_OF_FILES)


def test_a_sharded_model_with_quantised_parameters(tmp_path: Path) -> None:
    sizes = {"replicate_size": 1, "data_parallel_size": "auto"}
    given = {"codec": "qsgd:bits=8", "parameters": "int8", "min_compress_numel": 0, **sizes}
    strategy = strategy_from(tmp_path, CompressedModelParallelStrategy, timeout="0:00:40", **given)
    assert strategy._shard_settings is not None
    assert strategy._shard_settings.parameters.leaves()[0] == Int8()
    assert strategy._timeout == timedelta(seconds=40)


def test_local_steps_with_an_outer_optimizer_and_its_schedule(tmp_path: Path) -> None:
    strategy = strategy_from(
        tmp_path,
        LocalUpdateStrategy,
        outer_optimizer=of_class("torch.optim.AdamW", lr=0.1),
        outer_schedule=of_class("torch.optim.lr_scheduler.CosineAnnealingLR", T_max=50),
    )
    outer = strategy._outer_optimizer([torch.zeros(2)])
    schedule = strategy._outer_schedule(outer)
    assert (type(outer), type(schedule)) == (AdamW, CosineAnnealingLR)
    assert (outer.defaults["lr"], schedule.T_max) == (0.1, 50)


def test_local_steps_of_a_sharded_model(tmp_path: Path) -> None:
    ours = {"method": "streaming", "codec": "int4", "evaluate": "worker", "exchange_timeout": 30}
    theirs = {"data_parallel_size": "auto", "save_distributed_checkpoint": False}
    given = {**ours, **theirs, "replicate_size": 2}
    strategy = strategy_from(tmp_path, LocalUpdateModelParallelStrategy, **given)
    assert strategy._schedule.fragments == 4
    assert strategy._settings.exchange_timeout == 30
    assert strategy._sizes == (2, "auto", 1)
    assert not strategy._save_distributed_checkpoint


def test_a_bad_value_is_refused_with_our_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"codec 'topk' takes ratio=0.01, .* got 'size=3'"):
        strategy_from(tmp_path, CompressedDDPStrategy, codec="topk:size=3")


def test_a_checkpoint_with_arguments_of_ours_and_of_lightning(tmp_path: Path) -> None:
    settings = {
        **{"snapshot": "blocking", "max_in_flight": 2, "on_busy": "skip", "writer": "thread"},
        **{"verify": "always", "on_error": "warn", "host_memory_limit": 1_000_000, "lock": False},
    }
    of_lightning = {"dirpath": f"{tmp_path}/here", "monitor": "score", "mode": "max"}
    of_lightning |= {"save_top_k": 2, "save_last": "link"}
    given = {"format": "sharded", "train_time_interval": "0:30:00", **settings, **of_lightning}
    callbacks = [of_class("lightning_dist.AsyncCheckpoint", **given)]
    callback = trainer_from(tmp_path, callbacks=callbacks).checkpoint_callback
    assert type(callback) is AsyncCheckpoint
    assert vars(callback.settings) == settings
    assert callback._train_time_interval == timedelta(minutes=30)
    assert {"format": "sharded", **of_lightning}.items() <= vars(callback).items()


def test_the_signature_of_a_checkpoint_has_the_arguments_of_lightning() -> None:
    theirs, ours = signature(ModelCheckpoint).parameters, signature(AsyncCheckpoint).parameters
    assert {**theirs, **ours} == dict(ours)
    assert [*ours][: len(theirs)] == [*theirs]
    assert {"snapshot", "lock"} <= ours.keys()
    assert not {"self", "args", "kwargs"} & ours.keys()
