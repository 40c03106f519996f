"""The names that `import lightning_dist` adds, once each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping

import lightning as L
import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from processes import run

import lightning_dist
from lightning_dist import CODECS, CompressedDDPStrategy
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from lightning_dist.integrations.registration import register_all, register_lightning

NAMES = {
    "compressed_ddp": {"start_method": "popen"},
    "compressed_ddp_spawn": {"start_method": "spawn"},
    "compressed_ddp_fork": {"start_method": "fork"},
    "compressed_ddp_notebook": {"start_method": "fork"},
    "compressed_ddp_find_unused_parameters_true": {"find_unused_parameters": True},
    **{f"compressed_ddp_{codec}": {"codec": codec} for codec in CODECS},
}


@pytest.mark.parametrize(("name", "arguments"), NAMES.items(), ids=list(NAMES))
def test_lightning_has_the_name(name: str, arguments: Mapping[str, object]) -> None:
    """Lower-case, because Lightning lower-cases what the user writes."""
    assert name == name.lower()
    assert StrategyRegistry[name]["init_params"] == arguments
    assert type(StrategyRegistry.get(name)) is CompressedDDPStrategy


def test_there_are_no_other_names() -> None:
    ours = {name for name in StrategyRegistry if "compressed" in name}
    assert ours == set(NAMES)
    assert {name for name in STRATEGY_REGISTRY if "compressed" in name} == set(NAMES)


@pytest.mark.parametrize(("name", "arguments"), NAMES.items(), ids=list(NAMES))
def test_fabric_has_the_name(name: str, arguments: Mapping[str, object]) -> None:
    assert STRATEGY_REGISTRY[name]["init_params"] == arguments
    assert type(STRATEGY_REGISTRY.get(name)) is FabricStrategy


@pytest.mark.parametrize(
    ("name", "codec"), [("compressed_ddp", "int8"), ("compressed_ddp_int4", "int4")]
)
def test_fabric_takes_the_name(name: str, codec: str) -> None:
    fabric = Fabric(strategy=name, accelerator="cpu", devices=2)
    assert isinstance(fabric.strategy, FabricStrategy)
    assert fabric.strategy._settings.codec.name == codec


# What a fresh interpreter imports first, and that Lightning then takes the name.
ORDERS = (
    "import lightning_dist, lightning",
    "from lightning_dist import CompressedDDPStrategy",
    "from lightning_dist.fabric import CompressedDDPStrategy",
)


@pytest.mark.parametrize("first", ORDERS)
def test_the_order_of_imports_does_not_matter(first: str) -> None:
    last = "from lightning.pytorch.strategies import StrategyRegistry as known; print(*known)"
    done = run([sys.executable, "-c", f"{first}; {last}"], limit=60).require_success()
    assert set(NAMES) <= set(done.output.split())


def test_importing_again_changes_nothing() -> None:
    before = {name: dict(entry) for name, entry in StrategyRegistry.items()}
    importlib.reload(lightning_dist)
    register_all()
    assert {name: dict(entry) for name, entry in StrategyRegistry.items()} == before


def test_a_name_that_the_user_took_stays_theirs() -> None:
    registry = _StrategyRegistry()
    registry.register("compressed_ddp", DDPStrategy, description="mine")
    register_lightning(registry)
    assert registry["compressed_ddp"]["strategy"] is DDPStrategy
    assert registry["compressed_ddp"]["description"] == "mine"
    assert set(registry) == set(NAMES)


def test_the_names_that_ddp_registers_are_still_ddps() -> None:
    CompressedDDPStrategy.register_strategies(StrategyRegistry)
    assert StrategyRegistry["ddp"]["strategy"] is DDPStrategy


@pytest.mark.parametrize("name", ["compressed_ddp", "Compressed_DDP_BF16"])
def test_a_trainer_takes_the_name(name: str) -> None:
    trainer = L.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)
    assert type(trainer.strategy) is CompressedDDPStrategy
    assert trainer.world_size == 2
    assert trainer.strategy.comm_stats() == {}


def test_a_trainer_takes_the_name_from_its_environment_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "compressed_ddp_fp16")
    trainer = L.Trainer(accelerator="cpu", devices=2, logger=False)
    assert type(trainer.strategy) is CompressedDDPStrategy
    assert trainer.strategy._settings.codec.name == "fp16"
