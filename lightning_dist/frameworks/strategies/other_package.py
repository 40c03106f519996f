"""Our strategies, given to a Trainer or Fabric that cannot take them.

The package `pytorch_lightning` holds a second copy of every class, and a Trainer and Fabric need
different classes of one name. What they print of a strategy that they refuse is its ``repr``.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any, NoReturn

from lightning_dist.sync.arguments import of_other_package

_REGISTRIES = {
    "pytorch_lightning": ("Trainer", "StrategyRegistry"),
    "lightning_fabric": ("Fabric", "STRATEGY_REGISTRY"),
}
"""Who reads ``strategy=`` in these packages, and their registry of names."""

_HOMES = {"Trainer": "lightning_dist", "Fabric": "lightning_dist.fabric"}


def refuse_names(package: str, names: Collection[str]) -> None:
    """Let ``names`` be strategies of an imported ``package`` that say that it is the wrong one.

    Safe to repeat; names that it has already are left alone.
    """
    user, attribute = _REGISTRIES[package]
    registry: Any = getattr(import_module(f"{package}.strategies"), attribute)

    def refuse(**arguments: Any) -> NoReturn:
        raise ValueError(of_other_package(f"this {user}", package))

    for name in names:
        if name not in registry:
            registry.register(name, refuse, description="needs the package 'lightning'")


def described(strategy: object, *, user: str) -> str:
    """Text of a strategy that says who takes it: ``"Trainer"`` or ``"Fabric"``."""
    (other,) = _HOMES.keys() - {user}
    name = type(strategy).__name__
    return (
        f"<{name} for the {user} of the package 'lightning'; a {other} takes the one of "
        f"'from {_HOMES[other]} import {name}'>"
    )
