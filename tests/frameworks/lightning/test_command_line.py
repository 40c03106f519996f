"""Options of strategies, codecs and checkpoints: those in YAML that LightningCLI reads, by name."""

import math
import re
import sys
from collections.abc import Mapping
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from processes import ROOT
from replicas import of_all, require_compressed, require_equal, require_replicas
from scenarios.fabric_runs import Run
from scenarios.fitting import fit, plain
from scenarios.models import Regression
from scenarios.world import TIMEOUT, Facts, rank
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_dist import (
    BF16,
    CODECS,
    AsyncCheckpoint,
    CompressedDDPStrategy,
    CompressedModelParallelStrategy,
    Int8,
    LocalUpdateModelParallelStrategy,
    LocalUpdateStrategy,
    OneBitAdam,
    by_name,
    by_size,
    warmup,
)
from lightning_dist.codecs import DGC, POLICIES, QSGD, Codec, Int4, PowerSGD, Threshold, TopK
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from lightning_dist.settings import resolve
from lightning_dist.settings.exchange import POLICIES as POLICIES_OF_FILES
from lightning_dist.settings.exchange import ExchangeSettings

pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")


OPTIONS: dict[str, Codec] = {
    "topk:ratio=0.01": TopK(ratio=0.01),
    "topk:ratio=0.05,values=int8,block_size=1024": TopK(0.05, 1024, "int8"),
    "int4:block_size=64,hadamard=true": Int4(block_size=64, hadamard=True),
    "dgc:ratio=0.05,warmup_steps=4,clip=1.0": DGC(ratio=0.05, warmup_steps=4, clip=1.0),
    "powersgd:rank=2,two_phase=true": PowerSGD(rank=2, two_phase=True),
    "qsgd:bits=2,block_size=64,norm=l2": QSGD(bits=2, block_size=64, norm="l2"),
    "threshold:tau=2.0": Threshold(tau=2.0),
}
GUIDE = ROOT / "docs/guide.md"


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
    assert strategy._settings.inter == BF16()


def test_arguments_of_ours_and_of_ddp(tmp_path: Path) -> None:
    of_ddp = {"bucket_cap_mb": 5, "find_unused_parameters": True}
    of_lightning = {"process_group_backend": "gloo", "timeout": "0:00:40"}
    ours = {"codec": "int8", "error_feedback": False, "hierarchical": "auto"}
    ours |= {"min_compress_numel": 0, "start_step": 10, "compile_kernels": False}
    strategy = strategy_from(tmp_path, CompressedDDPStrategy, **ours, **of_ddp, **of_lightning)
    assert strategy._settings == ExchangeSettings(**ours)
    assert strategy._ddp_kwargs | of_ddp == strategy._ddp_kwargs
    assert strategy._ddp_kwargs["gradient_as_bucket_view"] is False, "the rest: DDP's defaults"
    assert strategy.process_group_backend == "gloo"
    assert strategy._timeout == timedelta(seconds=40)


@pytest.mark.parametrize("text", OPTIONS)
def test_options_of_a_codec_in_the_string(tmp_path: Path, text: str) -> None:
    strategy = strategy_from(tmp_path, CompressedDDPStrategy, codec=text)
    assert strategy._settings.inter == OPTIONS[text]


def test_a_codec_object(tmp_path: Path) -> None:
    codec = of_class("lightning_dist.codecs.PowerSGD", rank=3, two_phase=True)
    strategy = strategy_from(tmp_path, CompressedDDPStrategy, codec=codec)
    assert strategy._settings.inter == PowerSGD(rank=3, two_phase=True)


def test_policies_are_those_of_the_guide(tmp_path: Path) -> None:
    """Here and in the settings file."""
    (written,) = re.findall(r"```yaml\n(codec:.*?)```", GUIDE.read_text(), re.DOTALL)
    large = by_size("int8", min_numel=65536)
    named = by_name("int4", {r"head\.weight": "int8", "embed": "none"})
    expected = warmup({0: "none", 200: large, 1000: named})
    strategy = strategy_from(tmp_path, CompressedDDPStrategy, **yaml.safe_load(written))
    assert strategy._settings.inter == expected
    (tmp_path / "ours.yaml").write_text(written)
    environ = {"LIGHTNING_DIST_CONFIG": str(tmp_path / "ours.yaml"), "HF_HOME": "/"}
    assert ExchangeSettings(**resolve(environ=environ).options).inter == expected
    assert set(POLICIES) == set(POLICIES_OF_FILES)


def test_a_sharded_model_with_quantised_parameters(tmp_path: Path) -> None:
    sizes = {"replicate_size": 1, "data_parallel_size": "auto"}
    given = {"codec": "qsgd:bits=8", "parameters": "int8", "min_compress_numel": 0, **sizes}
    strategy = strategy_from(tmp_path, CompressedModelParallelStrategy, timeout="0:00:40", **given)
    assert strategy._settings.policy_of_parameters.leaves()[0] == Int8()
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
    assert strategy._settings.fragments == 4
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
        "format": "sharded",
    }
    of_lightning = {"dirpath": f"{tmp_path}/here", "monitor": "score", "mode": "max"}
    of_lightning |= {"save_top_k": 2, "save_last": "link"}
    given = {"train_time_interval": "0:30:00", **settings, **of_lightning}
    callbacks = [of_class("lightning_dist.AsyncCheckpoint", **given)]
    callback = trainer_from(tmp_path, callbacks=callbacks).checkpoint_callback
    assert type(callback) is AsyncCheckpoint
    assert vars(callback.settings) == settings
    assert callback._train_time_interval == timedelta(minutes=30)
    assert of_lightning.items() <= vars(callback).items()


def test_the_signature_of_a_checkpoint_has_the_arguments_of_lightning() -> None:
    theirs, ours = signature(ModelCheckpoint).parameters, signature(AsyncCheckpoint).parameters
    assert {**theirs, **ours} == dict(ours)
    assert [*ours][: len(theirs)] == [*theirs]
    assert {"snapshot", "lock"} <= ours.keys()
    assert not {"self", "args", "kwargs"} & ours.keys()


HIDDEN = 256  # weights of 4096 elements: compressed by default
WEIGHTS, BIAS = 2 * 16 * HIDDEN, HIDDEN  # elements; the bias stays uncompressed
STEPS, FREEZE = 8, 5


@pytest.mark.parametrize("text", OPTIONS)
def test_strategies_take_options_in_the_string(text: str) -> None:
    for strategy in (CompressedDDPStrategy, FabricStrategy):
        assert strategy(codec=text)._settings.inter == OPTIONS[text]


def require_trained(facts: Facts, codec: str) -> None:
    if codec == "threshold":  # with a small tau it sends more than uncompressed, as it says
        require_replicas(facts)
    else:
        require_compressed(facts, steps=STEPS)
    assert all(map(math.isfinite, facts["losses"])), facts["losses"]
    parts = facts["stats"]["per_codec"]
    assert parts[codec]["raw_bytes"] == STEPS * 4 * WEIGHTS
    assert parts["none"]["raw_bytes"] == STEPS * 4 * BIAS


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_trains_under_its_registered_name(codec: str) -> None:
    """With the defaults."""
    facts = fit(Regression(HIDDEN), f"compressed_ddp_{codec}")
    if codec in ("none", "fp16", "bf16"):  # these take the bias too
        require_replicas(facts)
        assert all(map(math.isfinite, facts["losses"]))
        assert set(facts["stats"]["per_codec"]) == {codec}
        return
    require_trained(facts, codec)


WIRE_BYTES = {
    # By hand: 41 of 4096, rounded up to even, in 3.5 bytes; 52 of 1024 in 2.5 and a scale.
    "topk:ratio=0.01": WEIGHTS / 4096 * 42 * 3.5,
    "topk:ratio=0.05,values=int8,block_size=1024": WEIGHTS / 1024 * (52 * 2.5 + 2),
}


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_trains_in_lightning_and_changes_what_is_sent(option: str) -> None:
    codec = option.split(":")[0]
    facts = fit(Regression(HIDDEN), CompressedDDPStrategy(option, timeout=TIMEOUT))
    require_trained(facts, codec)
    if option in WIRE_BYTES:
        sent = facts["stats"]["per_codec"][codec]["wire_bytes"] / STEPS
        assert sent == pytest.approx(WIRE_BYTES[option], abs=2 * 16)  # planes are padded to 8


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_trains_in_fabric(option: str) -> None:
    codec = option.split(":")[0]
    momentum = 0.0 if codec == "dgc" else 0.9  # dgc brings its own
    run = Run(FabricStrategy(codec=option, timeout=TIMEOUT), momentum=momentum)
    run.train(6)
    facts = run.facts()
    require_compressed(facts, steps=6)
    assert facts["stats"]["per_codec"][codec]["raw_bytes"] == 6 * 4 * WEIGHTS


def elements(per_codec: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How many each codec has taken."""
    return {codec: count["raw_bytes"] / 4 for codec, count in per_codec.items()}


class OneBit(Regression):
    """Remembers after every batch how many elements each codec has taken."""

    def __init__(self) -> None:
        super().__init__(HIDDEN)
        self.raw: list[Mapping[str, float]] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OneBitAdam(self.parameters(), lr=0.01, freeze_step=FREEZE)

    def on_train_batch_end(self, *_: Any) -> None:
        self.raw.append(elements(self.trainer.strategy.comm_stats()["per_codec"]))


@pytest.mark.on_ranks(2)
def test_onebit_adam_has_two_phases_and_resumes_in_the_second_bit_for_bit(tmp_path: Path) -> None:
    """Gradients uncompressed for 5 steps, then momenta of the matrices through ``sign``; 12 steps
    in one go, and 8 + 4."""

    def trained(name: str, *, epochs: int, **arguments: Any) -> tuple[Facts, OneBit, Any]:
        model, saver = OneBit(), ModelCheckpoint(tmp_path, filename=name)
        saving = {"callbacks": [saver], "enable_checkpointing": True}
        facts = fit(model, "compressed_ddp_sign", max_epochs=epochs, **saving, **arguments)
        torch.distributed.barrier()
        file = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        return facts, model, file["optimizer_states"][0]["state"]

    whole, model, state = trained("whole", epochs=3)
    everything = WEIGHTS + BIAS
    warm = [{"none": everything * step} for step in range(1, FREEZE + 1)]
    frozen = [
        {"none": FREEZE * everything + step * BIAS, "sign": step * WEIGHTS}
        for step in range(1, 12 - FREEZE + 1)
    ]
    assert model.raw == [*warm, *frozen]
    assert set(whole["residuals"]) == {"net.0.weight", "net.2.weight"}
    assert all(residual.any() for residual in whole["residuals"].values())
    require_replicas(whole)
    assert len(set(whole["digests"])) == 12
    losses = of_all(whole["losses"])[0]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])

    half, *_ = trained("half", epochs=2)
    assert len(half["digests"]) == 8 > FREEZE
    assert half["digests"] == whole["digests"][:8]
    resumed, model, found = trained("resumed", epochs=3, ckpt_path=tmp_path / "half.ckpt")
    assert resumed["digests"] == whole["digests"][8:]
    require_equal(resumed["residuals"], whole["residuals"])
    for index, moments in state.items():
        require_equal(found[index], moments)
    assert model.raw == [{"none": n * BIAS, "sign": n * WEIGHTS} for n in range(1, 5)]


@pytest.mark.on_ranks(2)
def test_onebit_adam_in_fabric() -> None:
    """Connected by ``setup``; with ``none`` the momenta are exchanged exactly."""
    weights, numel, bias = [], 64 * 64, 64
    for codec, raw in {
        "sign": {"none": 5 * numel + 10 * bias, "sign": 5 * numel},
        "none": {"none": 10 * (numel + bias)},
    }.items():
        fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(codec=codec))
        fabric.launch()
        model = nn.Linear(64, 64)
        nn.init.zeros_(model.weight)
        optimizer = OneBitAdam(model.parameters(), lr=0.01, freeze_step=FREEZE)
        model, optimizer = fabric.setup(model, optimizer)
        generator = torch.Generator().manual_seed(rank())
        for _ in range(10):
            x = torch.randn(8, 64, generator=generator)
            optimizer.zero_grad()
            fabric.backward((model(x) - x).square().mean())
            optimizer.step()
        (stats,) = fabric.strategy.comm_stats()
        assert elements(stats["per_codec"]) == raw
        weights.append(model.weight.detach().clone())
        assert torch.equal(*of_all(weights[-1]))
    assert not torch.equal(*weights)


class Vector(Regression):
    """Nothing but 1-D parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LayerNorm(16)


@pytest.mark.on_ranks(2)
def test_what_must_not_train_is_refused_and_the_ranks_train_on() -> None:
    def strategy(codec: str) -> CompressedDDPStrategy:
        return CompressedDDPStrategy(codec, timeout=TIMEOUT)

    with pytest.raises(
        ValueError,
        match=r"codec powersgd.* none of the model's 2 parameters is one: lower the rank",
    ):
        fit(Vector(), strategy("powersgd"))
    require_compressed(fit(Regression(HIDDEN), "compressed_ddp_powersgd"), steps=STEPS)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy("powersgd"))
    fabric.launch()
    with pytest.raises(ValueError, match="none of the model's 2 parameters is one: lower the rank"):
        fabric.setup(nn.LayerNorm(16))
    with pytest.raises(
        ValueError, match=r"rank \* \(n \+ m\) < n \* m, and none of the model's 3 param"
    ):
        fit(Regression(), strategy("powersgd:rank=16"))
    with pytest.raises(
        ValueError, match=r"clipping would clip OneBitAdam's momenta .* leave it out"
    ):
        fit(OneBit(), strategy("sign"), gradient_clip_val=0.1)
    with pytest.raises(
        ValueError, match=r"OneBitAdam needs compressed DDP .* found none: use strategy='compressed"
    ):
        fit(OneBit(), plain())
    fit(Vector(), strategy("int8"))  # a warning
