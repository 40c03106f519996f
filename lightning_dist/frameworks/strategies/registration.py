"""Registration of the strategies, once Lightning is imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from lightning_dist.codecs import CODECS
from lightning_dist.frameworks.strategies.names import (
    ELASTIC_NAMES,
    LOCAL_NAMES,
    LOCAL_SHARDED_NAMES,
    NAME,
    NAMES,
    SHARDED_NAMES,
    register,
)


def _made_by(module: str, name: str) -> Callable[..., Any]:
    """A function that makes a strategy.

    Not the class: its module imports Lightning, and may itself be what imports it just now.
    """

    def make(**arguments: Any) -> Any:
        return getattr(import_module(f"lightning_dist.frameworks.{module}"), name)(**arguments)

    return make


lightning_strategy = _made_by("lightning.strategy", "CompressedDDPStrategy")
_LOCAL = _made_by("lightning.ddp", "LocalUpdateStrategy")
_SHARDED = _made_by("lightning.model_parallel", "CompressedModelParallelStrategy")
_LOCAL_SHARDED = _made_by("lightning.model_parallel", "LocalUpdateModelParallelStrategy")
_FABRIC = _made_by("fabric.ddp", "CompressedDDPStrategy")
_FABRIC_LOCAL = _made_by("fabric.ddp", "LocalUpdateStrategy")


def register_all() -> None:
    """Add our strategies to both registries. Safe to repeat."""
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    register(StrategyRegistry, lightning_strategy)
    register(StrategyRegistry, lightning_strategy, ELASTIC_NAMES)
    register(StrategyRegistry, _LOCAL, LOCAL_NAMES, what="local updates")
    register(StrategyRegistry, _SHARDED, SHARDED_NAMES, what="compressed FSDP2")
    register(
        StrategyRegistry, _LOCAL_SHARDED, LOCAL_SHARDED_NAMES, what="local updates of FSDP2 models"
    )
    register(STRATEGY_REGISTRY, _FABRIC)
    register(STRATEGY_REGISTRY, _FABRIC_LOCAL, LOCAL_NAMES, what="local updates")
    CODECS.on_add(_register_codec)


def _register_codec(codec: str) -> None:
    """The strategy of a codec that was added after Lightning was imported."""
    NAMES.setdefault(f"{NAME}_{codec}", {"codec": codec})
    register_all()
