"""The names that `import lightning_dist` adds, once each."""

from __future__ import annotations

import importlib
from typing import Any

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
from lightning_dist.integrations.strategies.names import (
    ELASTIC_NAMES,
    LOCAL_NAMES,
    LOCAL_SHARDED_NAMES,
    SHARDED_NAMES,
    register,
)
from lightning_dist.integrations.strategies.registration import lightning_strategy, register_all

NAMES = {
    "compressed_ddp": {"start_method": "popen"},
    "compressed_ddp_spawn": {"start_method": "spawn"},
    "compressed_ddp_fork": {"start_method": "fork"},
    "compressed_ddp_notebook": {"start_method": "fork"},
    "compressed_ddp_find_unused_parameters_true": {"find_unused_parameters": True},
    **{f"compressed_ddp_{codec}": {"codec": codec} for codec in CODECS},
}


@pytest.mark.parametrize(
    ("registry", "strategy"),
    [(StrategyRegistry, CompressedDDPStrategy), (STRATEGY_REGISTRY, FabricStrategy)],
    ids=["Lightning", "Fabric"],
)
def test_a_registry_has_the_names_and_no_others(registry: Any, strategy: type) -> None:
    """Lower-case, because Lightning lower-cases what the user writes."""
    ours = {name: registry[name]["init_params"] for name in registry if "compressed" in name}
    of_trainer = {**SHARDED_NAMES, **LOCAL_SHARDED_NAMES, **ELASTIC_NAMES}
    assert ours == {**NAMES, **LOCAL_NAMES, **(of_trainer if registry is StrategyRegistry else {})}
    for name in NAMES:
        assert name == name.lower()
        assert type(registry.get(name)) is strategy, name


@pytest.mark.parametrize(
    ("name", "codec"), [("compressed_ddp", "int8"), ("compressed_ddp_int4", "int4")]
)
def test_fabric_takes_the_name(name: str, codec: str) -> None:
    fabric = Fabric(strategy=name, accelerator="cpu", devices=2)
    assert isinstance(fabric.strategy, FabricStrategy)
    assert fabric.strategy._settings.codec.name == codec


# What an interpreter without Lightning imports first, and that Lightning then takes the names.
ORDERS = (
    "import lightning_dist, lightning",
    "from lightning_dist import CompressedDDPStrategy",
    "from lightning_dist.fabric import CompressedDDPStrategy",
)
IN_FORKS = """
import os, sys
assert not [name for name in sys.modules if name.startswith("lightning_dist")]
assert "lightning" not in sys.modules
for order in sys.argv[1:]:
    if os.fork() == 0:
        exec(order)
        from lightning.pytorch.strategies import StrategyRegistry
        print(*StrategyRegistry, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, order
"""


def test_the_order_of_imports_does_not_matter(torch_python: list[str]) -> None:
    done = run([*torch_python, "-c", IN_FORKS, *ORDERS], limit=100).require_success()
    known = [set(line.split()) for line in done.output.splitlines()]
    assert [set(NAMES) <= names for names in known] == [True] * len(ORDERS)


def test_importing_again_changes_nothing() -> None:
    before = {name: dict(entry) for name, entry in StrategyRegistry.items()}
    importlib.reload(lightning_dist)
    register_all()
    assert {name: dict(entry) for name, entry in StrategyRegistry.items()} == before


def test_a_name_that_the_user_took_stays_theirs() -> None:
    registry = _StrategyRegistry()
    registry.register("compressed_ddp", DDPStrategy, description="mine")
    register(registry, lightning_strategy)
    assert registry["compressed_ddp"]["strategy"] is DDPStrategy
    assert registry["compressed_ddp"]["description"] == "mine"
    assert set(registry) == set(NAMES)


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
