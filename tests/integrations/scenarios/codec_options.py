"""Every codec and its options through Lightning and Fabric; 1-bit Adam in a LightningModule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_dist import CODECS, CompressedDDPStrategy, OneBitAdam
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from scenarios.catalogue import TIMEOUT, Facts, folder, scenario
from scenarios.checkpoints import saved
from scenarios.fabric_runs import Run
from scenarios.fitting import fit, plain
from scenarios.models import Regression

HIDDEN = 256  # weights of 4096 elements: compressed by default
OPTIONS = (
    "topk:ratio=0.01",
    "topk:ratio=0.05,values=int8,block_size=1024",
    "int4:block_size=64,hadamard=true",
    "dgc:ratio=0.05,warmup_steps=4,clip=1.0",
    "powersgd:rank=2,two_phase=true",
    "threshold:tau=2.0",
    "qsgd:bits=2,block_size=64,norm=l2",
)
FREEZE = 5


def _short(facts: Facts) -> Facts:
    return {"finite": all(map(math.isfinite, facts["losses"])), **facts}


@scenario
def every_codec() -> Facts:
    """By the registered names, with the defaults."""
    return {codec: _short(fit(Regression(HIDDEN), f"compressed_ddp_{codec}")) for codec in CODECS}


@scenario
def options_in_lightning() -> Facts:
    return {
        option: _short(fit(Regression(HIDDEN), CompressedDDPStrategy(option, timeout=TIMEOUT)))
        for option in OPTIONS
    }


@scenario
def options_in_fabric() -> Facts:
    facts = {}
    for option in OPTIONS:
        momentum = 0.0 if option.startswith("dgc") else 0.9  # dgc brings its own
        run = Run(FabricStrategy(codec=option, timeout=TIMEOUT), momentum=momentum)
        run.train(6)
        facts[option] = run.facts()
    return facts


class OneBit(Regression):
    """Remembers after every batch how many elements each codec has taken."""

    def __init__(self) -> None:
        super().__init__(HIDDEN)
        self.raw: list[Mapping[str, float]] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OneBitAdam(self.parameters(), lr=0.01, freeze_step=FREEZE)

    def on_train_batch_end(self, *_: Any) -> None:
        counts = self.trainer.strategy.comm_stats()["per_codec"]
        self.raw.append({codec: count["raw_bytes"] / 4 for codec, count in counts.items()})


def _onebit(name: str, *, epochs: int, ckpt_path: Any = None) -> Facts:
    model = OneBit()
    facts = fit(
        model,
        "compressed_ddp_sign",
        max_epochs=epochs,
        callbacks=[saved(name)],
        enable_checkpointing=True,
        ckpt_path=ckpt_path,
    )
    file = torch.load(folder() / f"{name}.ckpt", weights_only=True)
    return facts | {"raw": model.raw, "optimizer": file["optimizer_states"][0]["state"]}


@scenario
def onebit() -> Facts:
    """12 steps in one go, and 8 + 4 with a checkpoint in the compressed phase."""
    whole = _onebit("onebit_whole", epochs=3)
    half = _onebit("onebit_half", epochs=2)
    path = folder() / "onebit_half.ckpt"
    return {
        "whole": whole,
        "half": half,
        "resumed": _onebit("onebit_resumed", epochs=3, ckpt_path=path),
    }


@scenario
def onebit_in_fabric() -> Facts:
    facts = {}
    for name, codec in {"sign": "sign", "none": "none"}.items():
        fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(codec=codec))
        fabric.launch()
        model = nn.Linear(64, 64)
        nn.init.zeros_(model.weight)
        optimizer = OneBitAdam(model.parameters(), lr=0.01, freeze_step=FREEZE)
        model, optimizer = fabric.setup(model, optimizer)
        generator = torch.Generator().manual_seed(fabric.global_rank)
        for _ in range(10):
            x = torch.randn(8, 64, generator=generator)
            optimizer.zero_grad()
            fabric.backward((model(x) - x).square().mean())
            optimizer.step()
        (stats,) = fabric.strategy.comm_stats()
        facts[name] = {
            "weight": model.weight.detach().clone(),
            "raw": {codec: count["raw_bytes"] / 4 for codec, count in stats["per_codec"].items()},
        }
    return facts


def _message(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return ""


class Vector(Regression):
    """Nothing but 1-D parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LayerNorm(16)


@scenario
def refused() -> Facts:
    """Messages of what must not train."""

    def strategy(codec: str) -> Any:
        return CompressedDDPStrategy(codec, timeout=TIMEOUT)

    def in_fabric() -> None:
        fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy("powersgd"))
        fabric.launch()
        fabric.setup(nn.LayerNorm(16))

    attempts: dict[str, Callable[[], object]] = {
        "1-D under powersgd": lambda: fit(Vector(), strategy("powersgd")),
        "1-D under powersgd in fabric": in_fabric,
        "rank as large as the matrix": lambda: fit(Regression(), strategy("powersgd:rank=16")),
        "onebit clipped": lambda: fit(OneBit(), strategy("sign"), gradient_clip_val=0.1),
        "onebit under ddp": lambda: fit(OneBit(), plain()),
        "1-D under int8": lambda: fit(Vector(), strategy("int8")),
    }
    return {name: _message(attempt) for name, attempt in attempts.items()}


@scenario
def after_refusals() -> Facts:
    """The same ranks train on."""
    _message(lambda: fit(Vector(), CompressedDDPStrategy("powersgd", timeout=TIMEOUT)))
    return fit(Regression(HIDDEN), "compressed_ddp_powersgd")
