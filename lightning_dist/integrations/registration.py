"""Registration of the strategies, once Lightning is imported."""

from __future__ import annotations

from collections import ChainMap
from typing import Any

from lightning_dist.codecs import CODECS
from lightning_dist.integrations.strategy_names import (
    ELASTIC_NAMES,
    LOCAL_NAMES,
    NAME,
    NAMES,
    SHARDED_NAMES,
    register,
)
from lightning_dist.integrations.wrong_strategy import explain_wrong_strategies


def register_all() -> None:
    """Add our strategies to both registries. Safe to repeat."""
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    register(StrategyRegistry, lightning_strategy)
    register(StrategyRegistry, lightning_strategy, ELASTIC_NAMES)
    register(StrategyRegistry, local_update_strategy, LOCAL_NAMES, what="local updates")
    register(StrategyRegistry, sharded_strategy, SHARDED_NAMES, what="compressed FSDP2")
    register(STRATEGY_REGISTRY, fabric_strategy)
    register(STRATEGY_REGISTRY, fabric_local_strategy, LOCAL_NAMES, what="local updates")
    CODECS.on_add(_register_codec)
    explain_wrong_strategies(
        "lightning", ChainMap(NAMES, ELASTIC_NAMES, LOCAL_NAMES, SHARDED_NAMES)
    )


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
    from lightning_dist.integrations.fabric.ddp import CompressedDDPStrategy

    return CompressedDDPStrategy(**arguments)


def fabric_local_strategy(**arguments: Any) -> Any:
    """A ``lightning_dist.fabric.LocalUpdateStrategy``."""
    from lightning_dist.integrations.fabric.local_updates import LocalUpdateStrategy

    return LocalUpdateStrategy(**arguments)


def local_update_strategy(**arguments: Any) -> Any:
    """A ``lightning_dist.LocalUpdateStrategy``."""
    from lightning_dist.integrations.lightning.local_updates import LocalUpdateStrategy

    return LocalUpdateStrategy(**arguments)
