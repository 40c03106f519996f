"""The names that ``import lightning_dist`` adds to Lightning's and Fabric's strategy registries."""

from __future__ import annotations

from typing import Any

from lightning_dist.codecs import CODECS
from lightning_dist.integrations.wrong_strategy import explain_wrong_strategies

_NAME = "compressed_ddp"
NAMES: dict[str, dict[str, Any]] = {
    _NAME: {"start_method": "popen"},
    f"{_NAME}_spawn": {"start_method": "spawn"},
    f"{_NAME}_fork": {"start_method": "fork"},
    f"{_NAME}_notebook": {"start_method": "fork"},
    f"{_NAME}_find_unused_parameters_true": {"find_unused_parameters": True},
    **{f"{_NAME}_{codec}": {"codec": codec} for codec in CODECS},
}
"""``compressed_ddp`` by start method, with unused parameters, and by codec: arguments by name."""


def register_all() -> None:
    """Add our strategies to both registries. Safe to repeat."""
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    register_lightning(StrategyRegistry)
    register_fabric(STRATEGY_REGISTRY)
    explain_wrong_strategies("lightning", NAMES)


def register_lightning(registry: Any) -> None:
    """:data:`NAMES`, for Trainer."""
    for name, arguments in NAMES.items():
        _add(registry, name, lightning_strategy, **arguments)


def register_fabric(registry: Any) -> None:
    """:data:`NAMES`, for Fabric."""
    for name, arguments in NAMES.items():
        _add(registry, name, fabric_strategy, **arguments)


# Not the classes: their modules import Lightning, and may themselves be what imports it just now.


def lightning_strategy(**arguments: Any) -> Any:
    """A ``lightning_dist.CompressedDDPStrategy``."""
    from lightning_dist.integrations.lightning.strategy import CompressedDDPStrategy

    return CompressedDDPStrategy(**arguments)


def fabric_strategy(**arguments: Any) -> Any:
    """A ``lightning_dist.fabric.CompressedDDPStrategy``."""
    from lightning_dist.integrations.fabric import CompressedDDPStrategy

    return CompressedDDPStrategy(**arguments)


def _add(registry: Any, name: str, strategy: Any, **arguments: Any) -> None:
    if name in registry:  # a second import, or the user's own: theirs stays
        return
    settings = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    registry.register(name, strategy, description=f"compressed DDP ({settings})", **arguments)
