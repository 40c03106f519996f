"""LightningCLI reads the strategy from YAML."""

from __future__ import annotations

import sys
from datetime import timedelta
from inspect import signature
from pathlib import Path

import lightning as L
import pytest
import torch
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
)


class Model(L.LightningModule):
    pass


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])


def trainer_from(tmp_path: Path, strategy: str) -> L.Trainer:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"trainer:\n  accelerator: cpu\n  devices: 2\n  logger: false\n  strategy:{strategy}\n"
    )
    cli = LightningCLI(Model, run=False, save_config_callback=None, args=["--config", str(config)])
    return cli.trainer


def test_by_name(tmp_path: Path) -> None:
    strategy = trainer_from(tmp_path, " compressed_ddp_bf16").strategy
    assert type(strategy) is CompressedDDPStrategy
    assert strategy._settings.codec == BF16()


def test_by_class_path_with_arguments_of_ours_and_of_ddp(tmp_path: Path) -> None:
    strategy = trainer_from(
        tmp_path,
        """
    class_path: lightning_dist.CompressedDDPStrategy
    init_args:
      codec: int8
      error_feedback: false
      hierarchical: auto
      min_compress_numel: 0
      start_step: 10
      compile_kernels: false
      bucket_cap_mb: 5
      find_unused_parameters: true
      process_group_backend: gloo
      timeout: "0:00:40"
""",
    ).strategy
    assert type(strategy) is CompressedDDPStrategy
    settings = strategy._settings
    assert (settings.codec, settings.error_feedback, settings.start_step) == (Int8(), False, 10)
    assert (settings.min_compress_numel, settings.compile_kernels) == (0, False)
    given = {"bucket_cap_mb": 5, "find_unused_parameters": True}
    assert strategy._ddp_kwargs | given == strategy._ddp_kwargs
    assert strategy._ddp_kwargs["gradient_as_bucket_view"] is False, "the rest: DDP's defaults"
    assert strategy.process_group_backend == "gloo"
    assert strategy._timeout == timedelta(seconds=40)


def test_by_class_path_with_a_codec_object(tmp_path: Path) -> None:
    strategy = trainer_from(
        tmp_path,
        """
    class_path: lightning_dist.CompressedDDPStrategy
    init_args:
      codec:
        class_path: lightning_dist.Int8
        init_args:
          block_size: 128
""",
    ).strategy
    assert strategy._settings.codec == Int8(block_size=128)


def test_a_sharded_model_with_quantised_parameters(tmp_path: Path) -> None:
    strategy = trainer_from(
        tmp_path,
        """
    class_path: lightning_dist.CompressedModelParallelStrategy
    init_args:
      codec: qsgd:bits=8
      parameters: int8
      replicate_size: 1
      data_parallel_size: auto
      min_compress_numel: 0
      timeout: "0:00:40"
""",
    ).strategy
    assert type(strategy) is CompressedModelParallelStrategy
    assert strategy._shard_settings is not None
    assert strategy._shard_settings.parameters.leaves()[0] == Int8()
    assert strategy._timeout == timedelta(seconds=40)


def test_local_steps_with_an_outer_optimizer_and_its_schedule(tmp_path: Path) -> None:
    strategy = trainer_from(
        tmp_path,
        """
    class_path: lightning_dist.LocalUpdateStrategy
    init_args:
      outer_optimizer:
        class_path: torch.optim.AdamW
        init_args:
          lr: 0.1
      outer_schedule:
        class_path: torch.optim.lr_scheduler.CosineAnnealingLR
        init_args:
          T_max: 50
""",
    ).strategy
    assert type(strategy) is LocalUpdateStrategy
    outer = strategy._outer_optimizer([torch.zeros(2)])
    schedule = strategy._outer_schedule(outer)
    assert (type(outer), type(schedule)) == (AdamW, CosineAnnealingLR)
    assert (outer.defaults["lr"], schedule.T_max) == (0.1, 50)


def test_local_steps_of_a_sharded_model(tmp_path: Path) -> None:
    strategy = trainer_from(
        tmp_path,
        """
    class_path: lightning_dist.LocalUpdateModelParallelStrategy
    init_args:
      method: streaming
      codec: int4
      evaluate: worker
      replicate_size: 2
      data_parallel_size: auto
      exchange_timeout: 30
      save_distributed_checkpoint: false
""",
    ).strategy
    assert type(strategy) is LocalUpdateModelParallelStrategy
    assert strategy._schedule.fragments == 4
    assert strategy._settings.exchange_timeout == 30
    assert strategy._sizes == (2, "auto", 1)
    assert not strategy._save_distributed_checkpoint


def test_a_bad_value_is_refused_with_our_message(tmp_path: Path) -> None:
    bad = """
    class_path: lightning_dist.CompressedDDPStrategy
    init_args:
      codec: int9
"""
    with pytest.raises(ValueError, match="codec must be one of 'none', 'fp16', 'bf16', 'int8'"):
        trainer_from(tmp_path, bad)


def test_a_checkpoint_with_arguments_of_ours_and_of_lightning(tmp_path: Path) -> None:
    callbacks = """
  callbacks:
  - class_path: lightning_dist.AsyncCheckpoint
    init_args:
      dirpath: checkpoints
      save_last: link
      train_time_interval: "0:30:00"
      snapshot: blocking
      host_memory_limit: 1000
"""
    trainer = trainer_from(tmp_path, f" auto{callbacks}")
    (found,) = (each for each in trainer.callbacks if isinstance(each, AsyncCheckpoint))
    assert (found.save_last, found._train_time_interval) == ("link", timedelta(minutes=30))
    assert (found.settings.snapshot, found.settings.host_memory_limit) == ("blocking", 1000)


def test_the_signature_of_a_checkpoint_has_the_arguments_of_lightning() -> None:
    theirs, ours = signature(ModelCheckpoint).parameters, signature(AsyncCheckpoint).parameters
    assert {**theirs, **ours} == dict(ours)
    assert [*ours][: len(theirs)] == [*theirs]
    assert {"snapshot", "lock"} <= ours.keys()
    assert not {"self", "args", "kwargs"} & ours.keys()
