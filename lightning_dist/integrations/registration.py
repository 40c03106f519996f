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
    from lightning_dist.integrations.lightning import CompressedDDPStrategy

    for suffix, start in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork")):
        _add(registry, NAME + suffix, CompressedDDPStrategy, start_method=start)
    _add(registry, f"{NAME}_notebook", CompressedDDPStrategy, start_method="fork")
    unused = f"{NAME}_find_unused_parameters_true"
    _add(registry, unused, CompressedDDPStrategy, find_unused_parameters=True)
    for codec in CODECS:
        _add(registry, f"{NAME}_{codec}", CompressedDDPStrategy, codec=codec)


def register_fabric(registry: Any) -> None:
    """``compressed_ddp``."""
    from lightning_dist.integrations.fabric import CompressedDDPStrategy

    _add(registry, NAME, CompressedDDPStrategy)


def _add(registry: Any, name: str, strategy: type, **arguments: Any) -> None:
    if name in registry:  # a second import, or the user's own: theirs stays
        return
    settings = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    registry.register(name, strategy, description=f"compressed DDP ({settings})", **arguments)
