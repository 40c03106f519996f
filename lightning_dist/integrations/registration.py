"""The names that ``import lightning_dist`` adds to Lightning's and Fabric's strategy registries."""

from __future__ import annotations

from typing import Any

from lightning_dist.codecs import CODECS

NAME = "compressed_ddp"


def register_all() -> None:
    """Add our strategies to both registries. Safe to repeat."""
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    register_lightning(StrategyRegistry)
    register_fabric(STRATEGY_REGISTRY)


def register_lightning(registry: Any) -> None:
    """``compressed_ddp`` by start method, with unused parameters, and by codec."""
    for suffix, start in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork")):
        _add(registry, NAME + suffix, lightning_strategy, start_method=start)
    _add(registry, f"{NAME}_notebook", lightning_strategy, start_method="fork")
    unused = f"{NAME}_find_unused_parameters_true"
    _add(registry, unused, lightning_strategy, find_unused_parameters=True)
    for codec in CODECS:
        _add(registry, f"{NAME}_{codec}", lightning_strategy, codec=codec)


def register_fabric(registry: Any) -> None:
    """``compressed_ddp``."""
    _add(registry, NAME, fabric_strategy)


# Not the classes: their modules import Lightning, and may themselves be what imports it just now.


def lightning_strategy(**arguments: Any) -> Any:
    """A ``lightning_dist.CompressedDDPStrategy``."""
    from lightning_dist.integrations.lightning import CompressedDDPStrategy

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
