"""What ``import lightning_dist`` does once Lightning is imported: it registers the strategies."""

from __future__ import annotations

from typing import Any

from lightning_dist.codecs import CODECS
from lightning_dist.integrations.strategy_names import NAME, NAMES, SHARDED, register
from lightning_dist.integrations.wrong_strategy import explain_wrong_strategies


def register_all() -> None:
    """Add our strategies to both registries. Safe to repeat."""
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    register(StrategyRegistry, lightning_strategy)
    register(STRATEGY_REGISTRY, fabric_strategy)
    CODECS.on_add(_register_codec)
    if SHARDED not in StrategyRegistry:
        StrategyRegistry.register(
            SHARDED, sharded_strategy, description="FSDP2, compressed between replicas"
        )
    explain_wrong_strategies("lightning", {*NAMES, SHARDED})


def _register_codec(codec: str) -> None:
    """The strategy of a codec that was added after Lightning was imported."""
    NAMES.setdefault(f"{NAME}_{codec}", {"codec": codec})
    register_all()


# Not the classes: their modules import Lightning, and may themselves be what imports it just now.


def lightning_strategy(**arguments: Any) -> Any:
    """A ``lightning_dist.CompressedDDPStrategy``."""
    from lightning_dist.integrations.lightning.strategy import CompressedDDPStrategy

    return CompressedDDPStrategy(**arguments)


def sharded_strategy(**arguments: Any) -> Any:
    """A ``lightning_dist.CompressedModelParallelStrategy``."""
    from lightning_dist.integrations.lightning.model_parallel import (
        CompressedModelParallelStrategy,
    )

    return CompressedModelParallelStrategy(**arguments)


def fabric_strategy(**arguments: Any) -> Any:
    """A ``lightning_dist.fabric.CompressedDDPStrategy``."""
    from lightning_dist.integrations.fabric import CompressedDDPStrategy

    return CompressedDDPStrategy(**arguments)
