"""Names of the strategies in the registries of Lightning and Fabric."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any, NoReturn

from lightning_dist.codecs import CODECS
from lightning_dist.sync.arguments import of_other_package

NAME = "compressed_ddp"
NAMES: dict[str, dict[str, Any]] = {
    NAME: {"start_method": "popen"},
    f"{NAME}_spawn": {"start_method": "spawn"},
    f"{NAME}_fork": {"start_method": "fork"},
    f"{NAME}_notebook": {"start_method": "fork"},
    f"{NAME}_find_unused_parameters_true": {"find_unused_parameters": True},
    **{f"{NAME}_{codec}": {"codec": codec} for codec in CODECS},
}
"""``compressed_ddp`` by start method, with unused parameters, and by codec: arguments by name."""


ELASTIC_NAMES: dict[str, dict[str, Any]] = {f"{NAME}_elastic": {"recovery": "in_process"}}
"""Names in Lightning's registry alone: with Fabric it is ElasticLoop that recovers."""

LOCAL_NAMES: dict[str, dict[str, Any]] = {
    "compressed_local_sgd": {"method": "local_sgd"},
    "compressed_diloco": {"method": "diloco"},
    "compressed_streaming_diloco": {"method": "streaming"},
    "compressed_sparseloco": {"method": "sparseloco"},
}
SHARDED = "compressed_model_parallel"
SHARDED_NAMES: dict[str, dict[str, Any]] = {SHARDED: {}}
"""Names in Lightning's registry alone: Fabric's strategy needs a function of the user's."""

LOCAL_SHARDED_NAMES: dict[str, dict[str, Any]] = {
    name.replace("compressed", SHARDED, 1): arguments for name, arguments in LOCAL_NAMES.items()
}
"""Names in Lightning's registry: ``compressed_model_parallel_diloco`` and the others."""


def register(
    registry: Any,
    make: Callable[..., Any],
    names: Mapping[str, Mapping[str, Any]] = NAMES,
    *,
    what: str = "compressed DDP",
) -> None:
    """Add ``names`` to ``registry``, as what ``make`` returns for their arguments."""
    for name, arguments in names.items():
        if name in registry:  # a second import, or the user's own: theirs stays
            continue
        settings = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        registry.register(name, make, description=f"{what} ({settings})", **arguments)


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
